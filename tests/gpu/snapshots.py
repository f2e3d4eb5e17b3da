"""vLLM's own snapshot of a started server (0.33): made, restored and timed, or why it is refused.

It takes CRIU 4 with its CUDA plugin (CRIU_CUDA_PLUGIN_DIR), NVIDIA's cuda-checkpoint, and root; a
model of a hub by the hash of its revision, one rank, and weights that can be read again, which
made-up ones cannot. So it is the small model here, laid out as if it came from a hub.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import killed_worker
import prompts
from endpoints import Endpoint
from results import Phase
from servers import VLLMServe, running, vllm_options, vllm_serve

from cog_triton.system.ports import free_ports

_MODEL = "verify/small"
_RESTORE_S = 120.0


class Refused(Exception):
    """vLLM makes or restores no snapshot here; says why."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of `model` in a directory of its own, by vLLM in `python`, before `until`."""

    python: Path
    model: Path
    place: Path
    environment: Mapping[str, str]
    until: float

    def measure(self, phase: Phase, name: str) -> bool:
        """Make it, restore it, and compare its texts with a usual server's; False if refused."""
        phase.put(f"{name}: there", _there())
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True, mode=0o700)
        try:
            row, texts = self._restored(*self._made())
        except Refused as refusal:
            print(f"  {name}: refused: {refusal}", flush=True)
            phase.add(f"{name}: returns", {"killed": f"refused: {refusal}"})
            return False
        finally:
            shutil.rmtree(self.place, ignore_errors=True)
        phase.add(f"{name}: returns", row)
        print(f"  {name}: {row}", flush=True)
        phase.check(f"{name}: it answers", row["first_token_s"] is not None, row)
        logs, values = self.place.parent / "logs", self.environment
        usual = vllm_serve("park-snapshot-usual", self.model, logs, self.python, **values)
        with running(usual):
            phase.put(f"{name}: usual start s", usual.start_s)
            expected = self._texts(usual.openai)
        return phase.check(f"{name}: as a usual server", texts == expected, (expected, texts))

    def _made(self) -> tuple[Path, float]:
        """The directory of a new one, and the seconds that it took."""
        revision = hashlib.sha1(_MODEL.encode()).hexdigest()
        hub = self.place / "hub" / f"models--{_MODEL.replace('/', '--')}"
        shutil.copytree(self.model, hub / "snapshots" / revision)
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text(revision)
        target, began = self.place / "made", time.monotonic()
        options = vllm_options(self.model, free_ports(1)[0])
        self._run(
            "create", [_MODEL, f"--revision={revision}", f"--snapshot-dir={target}", *options]
        )
        return target, round(time.monotonic() - began, 1)

    def _restored(self, made: Path, seconds: float) -> tuple[dict[str, Any], list[Any]]:
        """What is known of a snapshot that is restored, and its texts; its server is ended."""
        files = [path for path in made.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        told = f"vllm serve of {self.model.name}, for {size / 1e9:.1f} GB on disk in {seconds} s"
        row: dict[str, Any] = {"killed": told, "bytes": size, "made_s": seconds}
        pids = json.loads((made / "manifest.json").read_text("utf-8"))["process_tree"]
        (port,) = free_ports(1)
        endpoint, texts = Endpoint("restored", port), self._prompts()
        health = f"http://127.0.0.1:{port}/health"
        server = VLLMServe("restored", (), {}, made / "child.log", health, openai=port)
        options = [str(made), "--host=127.0.0.1", f"--port={port}"]

        async def both() -> dict[str, float | None]:
            began = time.monotonic()
            until = min(self.until, began + _RESTORE_S)
            back = killed_worker.until_back(server, endpoint, texts[0], began, until)
            coming = asyncio.create_task(back)
            try:
                await asyncio.to_thread(self._run, "restore", options)
                return await coming
            finally:
                coming.cancel()

        try:
            row |= asyncio.run(both())
            return row, self._texts(port)
        finally:
            for pid in pids:  # it has no parent of ours
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _run(self, action: str, options: Sequence[str]) -> None:
        """Run vLLM's command; raises `Refused` with the last error that it tells."""
        command = [str(self.python), "-m", "vllm.entrypoints.cli.main", "snapshot", action]
        environment = {"HF_HUB_CACHE": str(self.place / "hub"), "VLLM_NO_USAGE_STATS": "1"}
        process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit_s = max(20.0, self.until - time.monotonic())
        try:
            told, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it ends what it has started
            process.communicate()
            raise Refused(f"{action} was not done in {limit_s:.0f} s") from None
        if process.returncode:
            raise Refused(reason(told))

    def _prompts(self) -> list[prompts.Prompt]:
        return prompts.make(self.model, 4, 64, seed=12)

    def _texts(self, port: int) -> list[Any]:
        return bench.greedy(Endpoint("snapshot", port), self._prompts(), 32)


def _there() -> dict[str, bool]:
    """What vLLM asks of the machine, of which it names only the first that is missing."""
    plugin = Path(os.environ.get("CRIU_CUDA_PLUGIN_DIR", "")) / "cuda_plugin.so"
    programs = ("criu", "cuda-checkpoint", "nvidia-smi", "ps")
    found = {name: shutil.which(name) is not None for name in programs}
    return {**found, plugin.name: plugin.is_file(), "root": os.geteuid() == 0}


def reason(told: str) -> str:
    """The last error that a program tells, else its last line."""
    errors = re.findall(r"\b\w*(?:Error|Exception|error): .*", told)
    lines = [line for line in told.splitlines() if line.strip()]
    return str((errors or lines or ["it says nothing"])[-1]).strip()[:300]
