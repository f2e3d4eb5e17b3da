"""Check and measure the vLLM family on this machine's GPU, phase by phase.

    scripts/verify-gpu [--phase machine,checks,bench,prune] [--root DIRECTORY]

DIRECTORY (.work/gpu) is what scripts/setup-gpu set up, now if it was not. Results are in
DIRECTORY/results.json after everything that adds to them, and as tables in results.md after each
phase; a phase that is run again replaces what it found before. Logs of the servers are in
DIRECTORY/logs. Exit code 0 only if every check held in the phases that ran.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench
import models
import profiles
import prompts
import pruned
import table
from checks import Checks, together
from client import Client
from results import Phase, Results
from servers import REPOSITORY, Ours, Server, bare, ours, running
from ways import Predictions, TritonIds, Way

# For every server: vLLM's own choices need FlashInfer, which is compiled when first used.
_COMMON = {
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.25,
    "attention_backend": "FLASH_ATTN",
}
_SMALL = {"max_model_len": 8192, "kv_cache_memory_bytes": 8 << 30, **_COMMON}
# Without a cache of prefixes, which would know what another way to the same engine has asked.
_LARGE = {
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 20 << 30,
    "enable_prefix_caching": False,
    **_COMMON,
}
_CONCURRENCIES = (1, 64, 256)
_ROLE = "vLLM EngineCore"


class Driver:
    """The phases, over one set-up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.root: Path = options.root.resolve()
        self.results = Results(self.root / "results.json")
        self.logs = self.root / "logs"
        extra = dict(item.split("=", 1) for item in options.argument)
        self.extra = {name: _value(text) for name, text in extra.items()}
        small = self.root / "models" / "smollm2"
        self.small = models.small(small, {**_SMALL, **self.extra})
        large = self.root / "models" / "llama-8b"
        self.large = models.large(large, self.small, {**_LARGE, **self.extra})
        self.python: Path = options.engine_python or self.root / "vllm" / "bin" / "python"
        self.rehearsal: bool = options.rehearse
        self.until = 0.0

    def run(self) -> int:
        """Every phase that was asked for; how many checks did not hold."""
        phases: dict[str, Callable[[Phase], None]] = {
            "machine": self.machine,
            "checks": self.checks,
            "bench": self.bench,
            "prune": self.prune,
        }
        failed = 0
        for name in self.options.phase.split(","):
            if name not in phases:
                raise SystemExit(f"--phase {name!r}: must be of {', '.join(phases)}")
            phase, began = self.results.phase(name), time.monotonic()
            self.until = began + self.options.budget
            print(f"== {name}", flush=True)
            try:
                phases[name](phase)
            except Exception as error:  # noqa: BLE001 - the other phases are to be seen, too
                phase.check("the phase went through", False, f"{type(error).__name__}: {error}")
            phase.put("seconds", round(time.monotonic() - began, 1))
            failed += len(phase.failed)
            took = phase.seen["seconds"]
            print(f"== {name}: {took} s, failed: {phase.failed or 'none'}", flush=True)
            (self.root / "results.md").write_text(table.document(self.results.seen), "utf-8")
        print(f"tables: {self.root / 'results.md'}; all that was seen: results.json beside it")
        return failed

    def machine(self, phase: Phase) -> None:
        """What all of it runs on."""
        query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
        gpu = _said(["nvidia-smi", query, "--format=csv,noheader"])
        phase.put("gpu", gpu)
        phase.put("cpu", f"{os.cpu_count()} cores, {_cpu_name()}")
        phase.put("kernel", platform.platform())
        names = ("cog", "coglet", "nvidia-pytriton", "tritonclient", "numpy", "tokenizers")
        versions = {name: importlib.metadata.version(name) for name in names}
        phase.put("ours", {"python": platform.python_version(), **versions})
        code = (
            "import importlib.metadata as m, json, platform\n"
            "names = ('vllm', 'torch', 'transformers', 'triton', 'numpy', 'xgrammar')\n"
            "found = {name: m.version(name) for name in names}\n"
            "print(json.dumps({'python': platform.python_version(), **found}))"
        )
        told = _said([str(self.python), "-c", code])
        phase.put("vllm", json.loads(told) if told.startswith("{") else told)
        print(json.dumps(phase.seen, indent=1), flush=True)

    def checks(self, phase: Phase) -> None:
        """Both models served at once, each through all checks; then a crash of the small one's."""
        served = [
            ("SmolLM2", self.small, self._ours("checks-small", self.small, metrics=True)),
            ("Llama 8B", self.large, self._ours("checks-large", self.large, metrics=True)),
        ]
        if self.rehearsal:
            del served[1]
        texts = prompts.make(self.small, 64, 256)
        with running(*(server for _, _, server in served)):
            made = []
            for name, model, server in served:
                phase.put(f"{name}: start", {"seconds": server.start_s, **server.said()})
                sensible = name == "SmolLM2" and not self.rehearsal
                made.append(Checks(name, Client(server), phase, model, texts, sensible))
                made[-1].all()
            together(made)
            made[0].restart("our host of AsyncLLM" if self.rehearsal else _ROLE)

    def bench(self, phase: Phase) -> None:
        """vLLM's own server and ours at once, each with an engine, asked in turn."""
        mine = self._ours("bench-ours", self.large, END_ID="-1")
        theirs = bare("bench-bare", self.large, self.logs, self.python, **self._environment)
        ways: list[tuple[Way, Server]] = [
            (Way("vllm serve", theirs.openai), theirs),
            (Predictions("cog", mine.cog), mine),
            (Way("/v1", mine.openai), mine),
            (TritonIds("triton", mine.triton), mine),
        ]
        servers: list[Server] = [theirs, mine]
        if self.rehearsal:
            del ways[0], servers[0]
        with running(*servers):
            for server in servers:
                phase.put(f"{server.name}: start", {"seconds": server.start_s, **server.said()})
            self._same_tokens(phase, [way for way, _ in ways[: len(servers)] + ways[2:3]])
            self._rounds(phase, ways)
            texts = prompts.make(self.large, 512, bench.INPUT_TOKENS, seed=5)
            for way, server in ways if self.options.profile else ():
                if time.monotonic() > self.until:
                    break
                spy, target = self.python.parent / "py-spy", self.root / "profiles"
                phase.add("profiles", profiles.record(spy, way, server, texts, target))

    def prune(self, phase: Phase) -> None:
        """vLLM's own server over pruned copies: the same tokens, as fast, and started as fast."""
        output = self.root / "pruned"
        shutil.rmtree(output, ignore_errors=True)
        environment, report = pruned.prune(self.python, output)
        phase.put("files", pruned.sizes(report))
        freed = sum(row["freed"] for row in phase.seen["files"])
        print(f"  sm_{report['sm']}: {freed / 1e6:.0f} MB of device code freed", flush=True)
        paths = pruned.imported(self.python, environment)
        right = all(paths[name].startswith(str(output)) for name in ("torch", "vllm"))
        phase.check("the copies are imported", right, paths)
        environment = {**self._environment, **environment}
        whole = bare("prune-whole", self.large, self.logs, self.python, **self._environment)
        less = bare("prune-pruned", self.large, self.logs, self.python, **environment)
        again = bare("prune-pruned-again", self.large, self.logs, self.python, **environment)
        with running(less):  # compiles, if what was compiled before does not suit it
            phase.put("pruned: first start", {"seconds": less.start_s, **less.said()})
        with running(whole):
            phase.put("whole: start", {"seconds": whole.start_s, **whole.said()})
            with running(again):
                phase.put("pruned: start", {"seconds": again.start_s, **again.said()})
                ways: list[tuple[Way, Server]] = [
                    (Way("whole", whole.openai), whole),
                    (Way("pruned", again.openai), again),
                ]
                self._same_tokens(phase, [way for way, _ in ways], count=16, max_tokens=256)
                self._rounds(phase, ways)

    def _ours(self, name: str, engine: Path, *, metrics: bool = False, **environment: str) -> Ours:
        values = {**self._environment, **environment}
        python = None if self.rehearsal else self.python
        return ours(name, engine, self.logs, python, metrics=metrics, **values)

    @property
    def _environment(self) -> dict[str, str]:
        shared = {
            "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
            "VLLM_CACHE_ROOT": str(self.root / "vllm-cache"),
            "HF_HUB_OFFLINE": "1",
        }
        if self.rehearsal:
            shared["PYTHONPATH"] = str(REPOSITORY / "tests" / "doubles")
        return shared

    def _same_tokens(
        self, phase: Phase, ways: Sequence[Way], count: int = 8, max_tokens: int = 64
    ) -> None:
        """Greedy answers, one at a time, are the same text by every one of `ways`."""
        texts = prompts.make(self.large, count, bench.INPUT_TOKENS, seed=99)
        found = {way.name: bench.greedy(way, texts, max_tokens) for way in ways}
        first, *others = found
        phase.put("sample", str(found[first][0])[:400])
        for other in others:
            same = sum(a == b for a, b in zip(found[first], found[other], strict=True))
            name = f"{count} greedy answers of {max_tokens} tokens: {other} as {first}"
            phase.check(name, same == count, (same, found[first][:1], found[other][:1]))

    def _rounds(self, phase: Phase, ways: Sequence[tuple[Way, Server]]) -> None:
        texts = prompts.make(self.large, 2048, bench.INPUT_TOKENS)
        measured = bench.Bench(
            [(way, server.processes) for way, server in ways], texts, partial(phase.add, "rows")
        )
        concurrencies = [int(number) for number in self.options.concurrency.split(",")]
        measured.warm(max(concurrencies))
        for number in range(self.options.rounds):
            if not measured.round(number, concurrencies, self.until):
                print("  no time is left for more", flush=True)
                break
        rows = phase.seen.get("rows", [])
        phase.put("medians", bench.medians(rows))
        wrong = [error for row in rows for error in row["errors"]]
        phase.check("every answer had all of its tokens", not wrong, wrong[:2])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except OSError as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip()[-400:]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")


def main() -> int:
    """Run the phases; 0 if every check held."""
    # Ours is for this process and those that it makes for the load, not for the servers.
    os.environ["PYTHONPATH"] = os.environ.pop("VERIFY_GPU_PYTHONPATH", "")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are stopped then, too
    parser = argparse.ArgumentParser(
        prog="scripts/verify-gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--phase", default="machine,checks,bench,prune")
    parser.add_argument("--root", type=Path, default=REPOSITORY / ".work" / "gpu")
    parser.add_argument("--engine-python", type=Path, help="a Python with vLLM; else ROOT/vllm's")
    parser.add_argument("--budget", type=float, default=540, help="seconds for each phase")
    parser.add_argument("--rounds", type=int, default=3, help="of the benchmarks, at most")
    parser.add_argument("--concurrency", default=",".join(map(str, _CONCURRENCIES)))
    parser.add_argument("--profile", action="store_true", help="record where time goes (py-spy)")
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE",
                        help="one more engine argument for every server")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true",
                        help="no GPU: over the double of vLLM, without vllm serve")  # fmt: skip
    return 1 if Driver(parser.parse_args()).run() else 0


if __name__ == "__main__":
    sys.exit(main())
