"""Phases of scripts/verify-image; image_arguments.py has its command line."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench
import driver_files
import image_arguments
import newer_source
import operations
import prompts
import starts
import verify
from arguments import REPOSITORY
from endpoints import Endpoint, TritonIds, events
from image_servers import Container
from prompts import Prompt
from results import Phase
from servers import Ours, Server

_ASSEMBLY_S = 900
_DOUBLES = REPOSITORY / "tests" / "doubles"


class TokenIds(Endpoint):
    """Endpoint: OpenAI completions, whose output is token ids."""

    def body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        return {**super().body(prompt, max_tokens), "return_token_ids": True}

    def output(self, answer: bytes) -> Any:
        chosen = [c for event in events(answer) for c in event.get("choices", ())]
        return [number for choice in chosen for number in choice.get("token_ids") or ()]


class ImageDriver(verify.Driver):
    """Runs the phases over the image's root file system and its peer's."""

    def __init__(self, options: argparse.Namespace) -> None:
        options.engine_python = Path(sys.executable)
        index = json.loads((options.root / "image.json").read_text("utf-8"))
        self.about: dict[str, Any] = index["image"]
        super().__init__(options)
        common = (self.about["config"], self.root / "models")
        beside = (_DOUBLES,) if options.rehearse else ()
        self.image = Container(
            self.root / "root", *common, self.root / "image-cache", options.read_only, beside
        )
        self.newer = newer_source.lay_over(self.root / "root") if options.newer_source else {}
        self.peer = Container(self.root / "peer-root", *common, self.root / "peer-cache")

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {
            **super().phases(),
            "assembled": self.assembled,
            "operations": partial(operations.compare, self.image, self.peer, self.logs),
            "refusal": self.refusal,
            "start": partial(starts.measure, self),
        }

    def assembled(self, phase: Phase) -> None:
        """Wait for the image to be assembled; check its files against the image's list."""
        path, deadline = self.root / "assembled.json", time.monotonic() + _ASSEMBLY_S
        while not path.is_file():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {path} after {_ASSEMBLY_S} s")
            time.sleep(1)
        found = json.loads(path.read_text("utf-8"))
        for name, value in found["compared"].items():
            phase.put(name, value)
        phase.put("assembly_s", found["seconds"])
        total = found["compared"]["total"]
        equal = total.get("equal", 0)
        phase.check(f"all {equal} files are the image's", total == {"equal": equal, "extra": 0},
                    found["compared"]["names"])  # fmt: skip

    def machine(self, phase: Phase) -> None:
        """Note what it runs on, and which image it is."""
        super().machine(phase)
        labels = self.about["config"].get("Labels", {})
        told = {name: value for name, value in labels.items() if "schema" not in name}
        phase.put("image", {"reference": self.about["reference"], "labels": told})
        if self.options.newer_source:
            phase.put("source laid over the image's", self.newer)
        phase.put("driver_files", [str(path) for path in driver_files.libraries()])

    def refusal(self, phase: Phase) -> None:
        """Start the image for another GPU."""
        number = "86" if self.about["config"]["Labels"]["cog-triton.sm"] != "86" else "90"
        server = self.image.ours("refusal", self.small, self.logs, COG_TRITON_SM=number)
        server.launch()
        try:
            deadline = time.monotonic() + 120
            while "E1305" not in (said := server.tail()) and time.monotonic() < deadline:
                time.sleep(0.2)
            phase.check(f"COG_TRITON_SM={number}: E1305", "E1305" in said, said)
            line = next((line for line in said.splitlines() if "E1305" in line), "")
            phase.put("refusal", line[-600:])
        finally:
            server.stop()

    def compare(
        self,
        phase: Phase,
        model: Path,
        endpoints: Sequence[tuple[Endpoint, Server]],
        count: int = 8,
    ) -> None:
        """Besides, check that the tokens of the image's libraries are those of the whole ones."""
        ids = [TokenIds(e.name, e.port) for e, _ in endpoints if e.name == "vllm serve"]
        ids += [e for e, _ in endpoints if isinstance(e, TritonIds)]
        number, tokens = 2 * count, 32 * count
        texts = prompts.make(model, number, bench.INPUT_TOKENS, seed=41)
        if len(ids) == 2:
            whole, pruned = (bench.greedy(endpoint, texts, tokens) for endpoint in ids)
            same = sum(a == b for a, b in zip(whole, pruned, strict=True))
            different = len({token for one in whole for token in one})
            phase.put(
                "greedy", {"prompts": number, "tokens": tokens, "different_tokens": different}
            )
            name = f"{model.name}: {tokens} greedy tokens of {number} prompts, pruned as whole"
            phase.check(name, same == number and different > 0, (same, whole[:1], pruned[:1]))
        super().compare(phase, model, endpoints, count)

    def theirs(self, name: str, model: Path, *, rust: bool) -> list[tuple[Endpoint, Server]]:
        """See `Driver.theirs`."""
        if self.rehearsal:
            return super().theirs(name, model, rust=rust)
        kind = "rust" if rust else "python"
        server = self.peer.vllm(f"{name}-{kind}", model, self.logs, rust=rust, **self.environment)
        return [(Endpoint("vllm serve, Rust" if rust else "vllm serve", server.openai), server)]

    def ours(self, name: str, engine: Path, **environment: str) -> Ours:
        """The image's own entry point."""
        values = {**self.environment, **environment}
        return self.image.ours(name, engine, self.logs, **values)

    @property
    def environment(self) -> dict[str, str]:
        shared = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.rehearsal:
            shared |= {"COG_TRITON_SM": "", "PYTHONPATH": str(_DOUBLES)}
        return shared


def main() -> int:
    """Run the phases; 0 if every check held."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, verify.stop_once)
    try:
        return 1 if ImageDriver(image_arguments.parse()).run() else 0
    except KeyboardInterrupt as stopped:
        print(f"stopped by {stopped}; what was seen before is in results.json", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
