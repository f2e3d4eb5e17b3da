"""Rounds of one load on several ways in turn, medians over rounds, and greedy outputs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from load import Measured, Shares, ask, measure
from processes import cores, processor_seconds
from prompts import Prompt
from ways import Way

INPUT_TOKENS = OUTPUT_TOKENS = 256
# Requests of one measurement, by how many run at once.
REQUESTS = {1: 6, 64: 128, 256: 512}

Roles = Callable[[], Mapping[int, str]]


class Bench:
    """Measurements of several ways; each goes to `keep` as soon as it is there."""

    def __init__(
        self,
        ways: Sequence[tuple[Way, Roles]],
        prompts: Sequence[Prompt],
        keep: Callable[[dict[str, Any]], None],
        *,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> None:
        """`ways` come with what tells the processes of their servers."""
        self._ways = ways
        self._prompts = prompts
        self._keep = keep
        self._output_tokens = output_tokens
        self._next = 0

    def warm(self, concurrency: int) -> None:
        """Answers that are not measured, a batch of every way."""
        prompts = self._taken(concurrency)
        for way, _ in self._ways:
            measured = measure(way, prompts, concurrency, concurrency, 32)
            print(f"  warm-up {measured}", flush=True)

    def round(self, number: int, concurrencies: Sequence[int], until: float) -> bool:
        """Every way at every concurrency, with the same prompts, begun with another way each time.

        False if it was broken off at `until` (time.monotonic), between two measurements.
        """
        turn = number % len(self._ways)
        for concurrency in concurrencies:
            prompts = self._taken(REQUESTS.get(concurrency, 2 * concurrency))
            for way, roles in [*self._ways[turn:], *self._ways[:turn]]:
                if time.monotonic() > until:
                    return False
                self._measure(number, way, roles, concurrency, prompts)
        return True

    def _measure(
        self, number: int, way: Way, roles: Roles, concurrency: int, prompts: Sequence[Prompt]
    ) -> None:
        doing = roles()
        before = processor_seconds(doing)
        measured = measure(way, prompts, len(prompts), concurrency, self._output_tokens)
        used = cores(doing, before, processor_seconds(doing), measured.seconds)
        print(f"  round {number} {measured}  cores {used}", flush=True)
        self._keep({"round": number, **measured.as_dict(), "server_cores": used})

    def _taken(self, count: int) -> list[Prompt]:
        """The next prompts in turn."""
        taken = [self._prompts[(self._next + n) % len(self._prompts)] for n in range(count)]
        self._next += count
        return taken


def greedy(way: Way, prompts: Sequence[Prompt], max_tokens: int) -> list[Any]:
    """What one way generates for each prompt, one after another."""

    async def all_of_them() -> list[Any]:
        requests = [(way.request(prompt, max_tokens), len(prompt.ids)) for prompt in prompts]
        answers = [await ask(Shares(), way, r, length, max_tokens) for r, length in requests]
        return [way.output(answer) for answer in answers]

    return asyncio.run(all_of_them())


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median over rounds of every number and of all cores together, by way and concurrency."""
    numbers = [name for name, kind in Measured.__annotations__.items() if kind == "float"]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        for concurrency in sorted({row["concurrency"] for row in rows}):
            chosen = [r for r in rows if (r["way"], r["concurrency"]) == (way, concurrency)]
            if chosen:
                found.setdefault(way, {})[str(concurrency)] = {
                    **{name: statistics.median(r[name] for r in chosen) for name in numbers},
                    "cores": statistics.median(sum(r["server_cores"].values()) for r in chosen),
                    "rounds": len(chosen),
                    "errors": sum(len(r["errors"]) for r in chosen),
                }
    return found


def cores_by_process(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Processor cores of each process, by way, in the last round at the highest concurrency."""
    highest = max((row["concurrency"] for row in rows), default=0)
    return {row["way"]: row["server_cores"] for row in rows if row["concurrency"] == highest}
