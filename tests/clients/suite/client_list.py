"""The clients of the suite: runner, servers and lock of each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUNNERS = Path(__file__).parent / "runners"
LOCKS = [ROOT / "requirements" / f"clients-openai-{number}.lock" for number in (2, 3)]
"""Each of an environment; the second has the clients that take openai 3."""
NODE_LOCK = ROOT / "requirements" / "node" / "package-lock.json"
"""Of the clients for Node, which share one environment."""
KINDS = ("openvino", "whole", "mock", "scripted")
"""The demo model, streaming; the same with one response a request in Triton; the mock engine, and
one whose answers are scripted: it calls tools (`agent_script.py`)."""


@dataclass(frozen=True)
class Client:
    """A client's package."""

    name: str
    """Of its row; of a Python package, its name on the index."""
    servers: tuple[str, ...]
    """What it runs against: names of `KINDS`."""
    group: str = "rest"
    """`common` clients run in `make test-all`, the other ones in `make nightly`."""
    note: str = ""
    """What is not as released."""
    npm: str = ""
    """Of a client for Node: its package."""
    command: bool = False
    """Whether that is run as a command, by a runner in Python."""

    @property
    def runner(self) -> Path:
        ending = ".mjs" if self.npm and not self.command else ".py"
        return RUNNERS / f"run_{self.name.replace('-', '_')}{ending}"

    @property
    def lock(self) -> Path:
        return NODE_LOCK if self.npm else next(filter(self._pinned, reversed(LOCKS)))

    def version(self) -> str:
        """The one that the lock pins, with the note."""
        if self.npm:
            pinned = json.loads(self.lock.read_text())["packages"]
            return str(pinned[f"node_modules/{self.npm}"]["version"].removesuffix("-linux-x64"))
        version = self._pinned(self.lock)
        return f"{version}, {self.note}" if self.note else str(version)

    def _pinned(self, lock: Path) -> str | None:
        found = re.search(rf"^{self.name}==(\S+)", lock.read_text(), re.MULTILINE)
        return found[1] if found else None


_DEMO, _BOTH, _MOCK = ("openvino",), ("openvino", "scripted"), ("mock",)
_CODE = "@anthropic-ai/claude-code-linux-x64"
CLIENTS = (
    Client("openai", ("openvino", "mock", "scripted"), "common"),
    Client("openai-node", _BOTH, "common", npm="openai"),
    Client("anthropic", ("openvino", "mock", "scripted"), "common"),
    Client("claude-code", _BOTH, "common", npm=_CODE, command=True),
    Client("litellm", _DEMO, "common"),
    Client("langchain-openai", _BOTH, "common"),
    Client("pydantic-ai-slim", _BOTH, "common"),
    Client("tritonclient", ("openvino", "whole"), "common"),
    Client("replicate", _DEMO, "common"),
    Client("instructor", _DEMO),
    Client("openai-agents", _BOTH),
    Client("smolagents", _BOTH),
    Client("llama-index-core", _BOTH),
    Client("haystack-ai", _BOTH),
    Client("autogen-agentchat", _BOTH),
    Client("dspy", _BOTH),
    Client("llm", _DEMO),
    Client("vercel-ai", _BOTH, npm="ai"),
    Client("langchain-openai-node", _BOTH, npm="@langchain/openai"),
    Client("codex", ("scripted",), npm="@openai/codex-linux-x64", command=True),
    Client("llm-comply", ("scripted",)),
    Client("lm-eval", ("openvino", "mock")),
    Client("aiperf", _MOCK),
    Client("guidellm", _MOCK, note="with a stand-in for torch's DataLoader"),
)
"""In the order of the page."""


def chosen(names: list[str]) -> list[Client]:
    """The clients of these names and groups, all without any; ValueError names what is neither."""
    if unknown := {*names} - {one.name for one in CLIENTS} - {one.group for one in CLIENTS}:
        raise ValueError(f"unknown client {', '.join(sorted(unknown))}: see --list")
    return [one for one in CLIENTS if not names or one.name in names or one.group in names]
