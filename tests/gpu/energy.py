"""Joules of two tenants whose tokens are 3:1, and of the whole, beside the board's own counter."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import prompts
from endpoints import Endpoint
from killed_worker import Stream, run
from prompts import Prompt
from results import Phase
from servers import Ours, running

from cog_triton.system.gpus import energy_counter

if TYPE_CHECKING:
    from verify import Driver

BUDGETS, LEAST = {"energy": 240}, {"energy": 100}
_SHARES = {"three": 48, "one": 16}
"""Streams at once by tenant."""
_INPUT, _TOKENS, _ROUNDS = 64, 256, 3
_PATIENCE_S, _SETTLED_S, _IDLE_S = 90.0, 2.0, 5.0
_NEAR, _NEAR_SHARES = 0.05, 0.1


class Keyed(Endpoint):
    """Endpoint: completions by the key `key`."""

    key = ""

    def request(self, prompt: Prompt, max_tokens: int) -> bytes:
        head, _, body = super().request(prompt, max_tokens).partition(b"\r\n\r\n")
        return head + f"\r\nAuthorization: Bearer {self.key}\r\n\r\n".encode() + body


class Energy:
    """The phase ``energy`` of a `Driver`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"energy": self.energy}

    def energy(self, phase: Phase) -> None:
        """Serve two tenants at once, and compare what they are said to have used."""
        driver = self._driver
        read = energy_counter()
        if read is None:
            phase.put("not run", "the GPU's driver counts no joules")
            return
        driver.logs.mkdir(parents=True, exist_ok=True)
        file = driver.logs / "energy-keys"
        file.unlink(missing_ok=True)
        keys = {name: _add_key(file, name) for name in _SHARES}
        model = driver.small if driver.rehearsal else driver.large
        values = {"COG_TRITON_KEYS": str(file), "METRICS_PUBLIC": "1"}
        server = driver.ours("energy", model, **values)
        texts = prompts.make(model, sum(_SHARES.values()), _INPUT, seed=34)
        with running(server):
            asyncio.run(_both(server, keys, texts))  # a warm-up
            time.sleep(_SETTLED_S)
            board, before, began = read(), _metrics(server), time.monotonic()
            streams = [s for _ in range(_ROUNDS) for s in asyncio.run(_both(server, keys, texts))]
            time.sleep(_IDLE_S)
            seconds = time.monotonic() - began
            used, after = read() - board, _metrics(server)
        self._judge(phase, streams, seconds, used, {n: after[n] - before.get(n, 0) for n in after})

    @staticmethod
    def _judge(
        phase: Phase,
        streams: Sequence[Stream],
        seconds: float,
        board: float,
        found: Mapping[str, float],
    ) -> None:
        parts = {name: found[f"gpu_energy_joules:{name}"] for name in ("generation", "idle")}
        joules = {name: found[f"tenant_energy_joules:{name}"] for name in _SHARES}
        tokens = {name: found[f"tenant_generation_tokens:{name}"] for name in _SHARES}
        by_joules, by_tokens = (of["three"] / of["one"] for of in (joules, tokens))
        phase.put("energy", {
            "seconds": round(seconds, 1),
            "board's joules": round(board),
            **{f"{name} joules": round(value) for name, value in parts.items()},
            **{f"tenant {name}'s joules": round(value) for name, value in joules.items()},
            "tokens of three to one": round(by_tokens, 3),
            "joules of three to one": round(by_joules, 3),
            "joules a token made": round(sum(joules.values()) / sum(tokens.values()), 4),
        })  # fmt: skip
        print(f"  {phase.seen['energy']}", flush=True)
        whole = sum(stream.ended == "whole" for stream in streams)
        phase.check("energy: all streams are whole", whole == len(streams), whole)
        total = sum(parts.values())
        near = abs(total - board) <= _NEAR * board
        phase.check("energy: the parts are the board's counter", near, (total, board))
        shared = sum(joules.values())
        near = abs(shared - parts["generation"]) <= _NEAR * parts["generation"]
        phase.check("energy: the tenants' are all generations'", near, (shared, parts))
        near = abs(by_joules / by_tokens - 1) <= _NEAR_SHARES
        phase.check("energy: joules are as tokens", near, (by_joules, by_tokens))


async def _both(server: Ours, keys: Mapping[str, str], texts: Sequence[Prompt]) -> list[Stream]:
    """Streams of both tenants at once, in the shares of `_SHARES`."""
    jobs, first = [], 0
    for name, count in _SHARES.items():
        endpoint = type("Of", (Keyed,), {"key": keys[name]})(name, server.openai)
        jobs.append(run(endpoint, texts[first : first + count], _TOKENS, _PATIENCE_S))
        first += count
    return [stream for streams in await asyncio.gather(*jobs) for stream in streams]


def _add_key(file: Path, name: str) -> str:
    command = [sys.executable, "-m", "cog_triton", "keys", "add", name, "--file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def _metrics(server: Ours) -> dict[str, float]:
    """Counters of energy and of tenants' tokens, by name and label."""
    text = httpx.get(f"http://127.0.0.1:{server.openai}/metrics", timeout=10).text
    pattern = r'^cog_triton_(\w+?)_total\{(?:part|tenant)="(\w+)"\} (\S+)$'
    return {f"{n}:{label}": float(v) for n, label, v in re.findall(pattern, text, re.MULTILINE)}
