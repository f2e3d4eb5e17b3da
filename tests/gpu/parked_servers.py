"""Servers whose engines are parked: one that is started again, and one of two models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from results import Phase
from servers import Ours, running

_STOP_S = 120.0
_SWAP_S = 120.0
_SWAPS = 6


def restarted(phase: Phase, server: Ours, answers: Callable[[], list[Any]]) -> bool:
    """Stop a server with PARK_ENGINE=1 and start it again; whether it says the same as before."""
    try:
        with running(server):
            phase.put("restart: first start s", server.start_s)
            before = answers()
            took = _stopped(server)
        said = server.log.read_text("utf-8", "replace").splitlines()[-1]
        phase.put("restart: stopped", {"s": took, "said": said})
        phase.check("restart: the engine is off the GPU", "stays off the GPU" in said, said)
        with running(server):
            phase.put("restart: second start s", server.start_s)
            after = answers()
        print(f"  restart: {phase.seen}", flush=True)
        taken = "is taken over" in server.log.read_text("utf-8", "replace")
        phase.check("restart: the parked engine is taken over", taken, server.tail())
        return phase.check("restart: as before", after == before, (before, after))
    finally:
        drop = [sys.executable, "-m", "cog_triton", "park", "drop", "--all"]
        subprocess.run(drop, env={**os.environ, **server.environment}, check=True)


def swapped(phase: Phase, server: Ours, second: Path) -> bool:
    """Ask two models on one GPU in turn, `second` too; whether each says the same every time."""
    names = (Path(server.command[-1]).name, second.name)
    server.command = [*server.command, str(second), "--swap"]
    said: dict[str, set[str]] = {name: set() for name in names}
    with running(server):
        phase.put("swap: start s", server.start_s)
        for number in range(_SWAPS):
            name = names[(number + 1) % 2]
            body = {"model": name, "prompt": "One two three", "max_tokens": 8, "temperature": 0}
            began = time.monotonic()
            url = f"http://127.0.0.1:{server.openai}/v1/completions"
            answer = httpx.post(url, json=body, timeout=_SWAP_S)
            took = round(time.monotonic() - began, 3)
            phase.add("swap: answers", {"model": name, "status": answer.status_code, "s": took})
            print(f"  swap {number}: {name} after {took} s", flush=True)
            if answer.status_code == 200:
                said[name].add(answer.json()["choices"][0]["text"])
        log = server.log.read_text("utf-8", "replace")
        phase.put("swap: swapped in s", re.findall(r"swapped in ([\d.]+) s", log))
    alike = all(len(texts) == 1 for texts in said.values())
    return phase.check("swap: each model says one thing", alike, said)


def _stopped(server: Ours) -> float:
    """Seconds until a server has ended by itself, its engine parked."""
    assert server.process is not None
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(_STOP_S)
    return round(time.monotonic() - began, 1)
