"""A server of two models on one GPU, whose engines are parked in turn."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
from results import Phase
from servers import Ours, running

_SWAP_S = 120.0
_SWAPS = 6


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
