"""Benchmark rounds on several endpoints in turn, medians over rounds, and greedy outputs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from endpoints import Endpoint
from load import LoadResult, ask, measure
from processes import cores, cpu_seconds
from prompts import Prompt

INPUT_TOKENS = OUTPUT_TOKENS = 256
# For TTFT with one request at a time, which few long answers do not tell.
_SHORT_REQUESTS, _SHORT_TOKENS = 24, 8
# Requests of one measurement, by how many run at once.
REQUESTS = {1: 4, 64: 128, 256: 512, 512: 1024, 1024: 2048}

Roles = Callable[[], Mapping[int, str]]


class Bench:
    """Measurements of several endpoints; `keep` gets each as soon as it is done."""

    def __init__(
        self,
        endpoints: Sequence[tuple[Endpoint, Roles]],
        prompts: Sequence[Prompt],
        keep: Callable[[dict[str, Any]], None],
        *,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> None:
        """`endpoints` come with a function that lists the processes of their server."""
        self._endpoints = endpoints
        self._prompts = prompts
        self._keep = keep
        self._output_tokens = output_tokens
        self._next = 0

    def warm_up(self, concurrency: int) -> None:
        """Warm up every endpoint with a batch that is not measured."""
        prompts = self._taken(concurrency)
        for endpoint, _ in self._endpoints:
            at_once = min(concurrency, endpoint.at_most)
            measured = measure(endpoint, prompts, concurrency, at_once, 32)
            print(f"  warm-up {measured}", flush=True)

    def round(self, number: int, concurrencies: Sequence[int], until: float) -> bool:
        """Measure endpoints at every concurrency they take, with the same prompts, in rotation.

        Returns False if `until` (time.monotonic) came before the last measurement.
        """
        for place, concurrency in enumerate(concurrencies):
            turn = (number + place) % len(self._endpoints)
            prompts = self._taken(REQUESTS.get(concurrency, 2 * concurrency))
            for endpoint, roles in [*self._endpoints[turn:], *self._endpoints[:turn]]:
                if time.monotonic() > until:
                    return False
                if concurrency > endpoint.at_most:
                    continue
                self._measure(number, endpoint, roles, concurrency, prompts)
        return True

    def _measure(
        self,
        number: int,
        endpoint: Endpoint,
        roles: Roles,
        concurrency: int,
        prompts: Sequence[Prompt],
    ) -> None:
        doing = roles()
        before = cpu_seconds(doing)
        measured = measure(endpoint, prompts, len(prompts), concurrency, self._output_tokens)
        used = cores(doing, before, cpu_seconds(doing), measured.seconds)
        if concurrency == 1:
            texts = self._prompts[-_SHORT_REQUESTS:]
            short = measure(endpoint, texts, _SHORT_REQUESTS, 1, _SHORT_TOKENS)
            times = {name: getattr(short, name) for name in ("ttft_mean", "ttft_p50", "ttft_p99")}
            measured = replace(measured, **times)
        print(f"  round {number} {measured}  cores {used}", flush=True)
        self._keep({"round": number, **measured.as_dict(), "server_cores": used})

    def _taken(self, count: int) -> list[Prompt]:
        """The next `count` prompts, from the first again after the last."""
        taken = [self._prompts[(self._next + n) % len(self._prompts)] for n in range(count)]
        self._next += count
        return taken


def greedy(endpoint: Endpoint, prompts: Sequence[Prompt], max_tokens: int) -> list[Any]:
    """Greedy output of one endpoint for each prompt, one after another."""

    async def all_of_them() -> list[Any]:
        answers = [await ask(endpoint, prompt, max_tokens) for prompt in prompts]
        return [endpoint.output(answer) for _, answer in answers]

    return asyncio.run(all_of_them())


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median over rounds of every number and of all cores together, by endpoint and concurrency."""
    chosen: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        chosen.setdefault(row["endpoint"], {}).setdefault(row["concurrency"], []).append(row)
    names = dict.fromkeys(row["endpoint"] for row in rows)
    return {
        endpoint: {str(number): _median(of) for number, of in chosen[endpoint].items()}
        for endpoint in names
    }


def _median(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    numbers = [name for name, kind in LoadResult.__annotations__.items() if kind == "float"]
    rates = [row["tokens_per_s"] for row in rows]
    return {
        **{
            name: statistics.median(row[name] for row in rows)
            for name in numbers
            if name in rows[0]
        },
        "cores": statistics.median(sum(row["server_cores"].values()) for row in rows),
        "least": min(rates),
        "most": max(rates),
        "rounds": len(rows),
        "errors": sum(len(row["errors"]) for row in rows),
    }


def token_cost_by_process(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds of CPU a token, by endpoint, concurrency and process: medians over rounds."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        parts = found.setdefault(row["endpoint"], {}).setdefault(str(row["concurrency"]), {})
        for role, used in row["server_cores"].items():
            parts.setdefault(role, []).append(1e6 * used / row["tokens_per_s"])
    return {
        endpoint: {
            concurrency: {role: round(statistics.median(each), 1) for role, each in parts.items()}
            for concurrency, parts in of.items()
        }
        for endpoint, of in found.items()
    }
