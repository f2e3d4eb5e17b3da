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
    """A client's package, or our reproduction of a script's requests."""

    name: str
    """Of its row; of a Python package, its name on the index."""
    servers: tuple[str, ...] = ()
    """What it runs against: names of `KINDS`."""
    limit_s: float = 300
    releases: str = ""
    """Of a reproduction: the script and its releases. It runs in the project's .venv."""

    note: str = ""
    """What is not as released."""
    npm: str = ""
    """Of a client for Node: its package."""
    command: bool = False
    """Whether that is run as a command, by a runner in Python."""

    @property
    def runner(self) -> Path:
        if self.releases:
            return RUNNERS / "run_reproductions.py"
        ending = ".mjs" if self.npm and not self.command else ".py"
        return RUNNERS / f"run_{self.name.replace('-', '_')}{ending}"

    @property
    def lock(self) -> Path | None:
        if self.npm:
            return NODE_LOCK
        return None if self.releases else next(filter(self._pinned, reversed(LOCKS)))

    def version(self) -> str:
        """The one that the lock pins, with the note; or the releases that are reproduced."""
        if self.lock is None:
            return self.releases
        if self.npm:
            pinned = json.loads(self.lock.read_text())["packages"]
            return str(pinned[f"node_modules/{self.npm}"]["version"].removesuffix("-linux-x64"))
        version = self._pinned(self.lock)
        return f"{version}, {self.note}" if self.note else str(version)

    def _pinned(self, lock: Path) -> str | None:
        found = re.search(rf"^{self.name}==(\S+)", lock.read_text(), re.MULTILINE)
        return found[1] if found else None


CLIENTS = (
    Client("openai", ("openvino", "mock")),
    Client("anthropic", ("openvino", "mock")),
    Client("litellm", ("openvino",)),
    Client("langchain-openai", ("openvino",)),
    Client("instructor", ("openvino",)),
    Client("pydantic-ai-slim", ("openvino", "scripted")),
    Client("openai-agents", ("openvino", "scripted")),
    Client("smolagents", ("openvino", "scripted")),
    Client("llama-index-core", ("openvino", "scripted")),
    Client("haystack-ai", ("openvino", "scripted")),
    Client("autogen-agentchat", ("openvino", "scripted")),
    Client("dspy", ("openvino", "scripted")),
    Client("llm", ("openvino",)),
    Client("openai-node", ("openvino", "scripted"), npm="openai"),
    Client("vercel-ai", ("openvino", "scripted"), npm="ai"),
    Client("langchain-openai-node", ("openvino", "scripted"), npm="@langchain/openai"),
    Client(
        "claude-code",
        ("openvino", "scripted"),
        npm="@anthropic-ai/claude-code-linux-x64",
        command=True,
    ),
    Client("codex", ("scripted",), npm="@openai/codex-linux-x64", command=True),
    Client("llm-comply", ("scripted",)),
    Client("lm-eval", ("openvino", "mock")),
    Client("aiperf", ("mock",)),
    Client("guidellm", ("mock",), note="with a stand-in for torch's DataLoader"),
    Client("replicate", ("openvino",)),
    Client("tritonclient", ("openvino", "whole")),
    Client(
        "inflight_batcher",
        releases="inflight_batcher_llm_client.py of tensorrtllm_backend, v0.7.2 to v0.19",
    ),
    Client(
        "end_to_end", releases="end_to_end_grpc_client.py of tensorrtllm_backend, v0.7.2 to v0.19"
    ),
    Client("original_scripts", releases="test_perf.py and benchmark.py of replicate/cog-triton"),
    Client("vllm_sample", releases="samples/client.py of vllm_backend, r23.10 to r25.12"),
)
"""In the order of the page."""
