"""Closed-loop load on one endpoint from several processes: fixed concurrency, timed per read.

Definitions: TTFT is from the moment before a request is sent to its first event with text. ITL are
the times between reads that brought text, of one stream; what comes in one read came at once. TPOT
is (end - first) / (tokens - 1) of a request. Tokens a second are all output tokens over the time
from the first request sent to the last answer read. Goodput are the requests a second whose TTFT
and TPOT were within `SLO`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from endpoints import Endpoint
from prompts import Prompt

SLO = {"ttft_s": 2.0, "tpot_s": 0.03}
_LAG_PERIOD_S = 0.01
_TIMEOUT_S = 240
_START_S = 60


@dataclass
class WorkerResult:
    """Measurements of one load process; times in seconds, `lags` of its own event loop."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    processor: float = 0.0
    requests: int = 0
    tokens: int = 0
    reads: int = 0


@dataclass(frozen=True)
class LoadResult:
    """Result of one load on one endpoint, all processes together; times in milliseconds."""

    endpoint: str
    concurrency: int
    requests: int
    tokens_per_s: float
    seconds: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p50: float
    tpot_p99: float
    goodput: float
    tokens_per_read: float
    load_processes: int
    load_lag_p99: float
    load_cores: float
    errors: list[str]

    def as_dict(self) -> dict[str, Any]:
        """As a dict for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.endpoint:12} c={self.concurrency:<4} {self.tokens_per_s:8.0f} tok/s"
            f"  TTFT {self.ttft_p50:6.1f}/{self.ttft_p99:6.1f} ms"
            f"  ITL {self.itl_p50:5.2f}/{self.itl_p99:6.2f} ms  TPOT {self.tpot_p50:5.2f} ms"
            f"  ({self.load_processes} processes, lag p99 {self.load_lag_p99:.1f} ms)"
            + (f"  {len(self.errors)} ERRORS: {self.errors[0]}" if self.errors else "")
        )


def measure(
    endpoint: Endpoint, prompts: Sequence[Prompt], requests: int, concurrency: int, max_tokens: int
) -> LoadResult:
    """Send `requests` requests, `concurrency` at once, from several processes; prompts repeat."""
    count = min(concurrency, max(1, min(8, len(os.sched_getaffinity(0)))))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    pipes = []
    for number in range(count):
        ours, theirs = context.Pipe(duplex=False)
        chosen = [prompts[place % len(prompts)] for place in range(number, requests, count)]
        slots = len(range(number, concurrency, count))
        arguments = (theirs, barrier, endpoint, chosen, slots, max_tokens)
        process = context.Process(target=_process, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append((process, ours))
    shares = []
    for process, pipe in pipes:
        try:
            shares.append(pipe.recv())
        except EOFError:
            process.join()
            shares.append(WorkerResult(errors=[f"a load's process ended with {process.exitcode}"]))
        process.join()
    return combine(endpoint.name, concurrency, shares)


def combine(endpoint: str, concurrency: int, shares: Sequence[WorkerResult]) -> LoadResult:
    """Merge the measurements of all processes; raises RuntimeError if none has any."""

    def all_of(name: str) -> list[float]:
        return sorted(value for share in shares for value in getattr(share, name))

    tokens, reads = (sum(getattr(share, name) for share in shares) for name in ("tokens", "reads"))
    ran = [share for share in shares if share.ended]
    if not ran:
        raise RuntimeError("; ".join(error for share in shares for error in share.errors))
    seconds = max(share.ended for share in ran) - min(share.began for share in ran)
    return LoadResult(
        endpoint,
        concurrency,
        sum(share.requests for share in shares),
        round(tokens / seconds, 1),
        round(seconds, 6),
        _mean(all_of("ttft")),
        percentile(all_of("ttft"), 50),
        percentile(all_of("ttft"), 99),
        percentile(all_of("itl"), 50),
        percentile(all_of("itl"), 99),
        percentile(all_of("tpot"), 50),
        percentile(all_of("tpot"), 99),
        round(sum(map(_within_slo, ran)) / seconds, 2),
        round(tokens / reads, 2) if reads else 0.0,
        len(shares),
        percentile(all_of("lags"), 99),
        round(sum(share.processor for share in shares) / seconds, 2),
        [error for share in shares for error in share.errors][:5],
    )


def _within_slo(share: WorkerResult) -> int:
    """Requests of several tokens whose TTFT and TPOT are within the SLO."""
    times = zip(share.ttft, share.tpot, strict=False)
    return sum(ttft <= SLO["ttft_s"] and tpot <= SLO["tpot_s"] for ttft, tpot in times)


def _mean(values: Sequence[float]) -> float:
    """Mean of seconds, in milliseconds."""
    return round(1000 * sum(values) / len(values), 3) if values else 0.0


def percentile(ordered: Sequence[float], rank: float) -> float:
    """Nearest-rank percentile of sorted seconds, in milliseconds."""
    if not ordered:
        return 0.0
    place = max(0, -(-len(ordered) * rank // 100) - 1)
    return round(ordered[int(place)] * 1000, 3)


def _process(
    pipe: Any,
    barrier: Any,
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    slots: int,
    max_tokens: int,
) -> None:
    share = WorkerResult()
    gc.disable()
    barrier.wait(_START_S)
    used = time.process_time()
    asyncio.run(_load(share, endpoint, prompts, slots, max_tokens))
    share.processor = time.process_time() - used
    pipe.send(share)


async def _load(
    share: WorkerResult, endpoint: Endpoint, prompts: Sequence[Prompt], slots: int, max_tokens: int
) -> None:
    requests = [(endpoint.request(prompt, max_tokens), len(prompt.ids)) for prompt in prompts]
    waiting = iter(requests)

    async def slot() -> None:
        for request, length in waiting:
            try:
                await asyncio.wait_for(
                    ask(share, endpoint, request, length, max_tokens), _TIMEOUT_S
                )
            except (TimeoutError, OSError, RuntimeError) as error:
                share.errors.append(f"{type(error).__name__}: {error}")

    heart = asyncio.create_task(_measure_lag(share.lags))
    share.began = time.perf_counter()
    await asyncio.gather(*(slot() for _ in range(slots)))
    share.ended = time.perf_counter()
    heart.cancel()


async def _measure_lag(lags: list[float]) -> None:
    """Record the event loop's lag, a hundred times a second."""
    while True:
        due = time.perf_counter() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        lags.append(max(0.0, time.perf_counter() - due))


async def ask(
    share: WorkerResult, endpoint: Endpoint, request: bytes, length: int, max_tokens: int
) -> bytes:
    """Send one request; raises RuntimeError unless the answer has exactly `max_tokens` tokens."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port, limit=1 << 20)
    writer.write(request)
    answer, times, seen = bytearray(), list[float](), 0
    try:
        while chunk := await reader.read(65536):
            now = time.perf_counter()
            answer += chunk
            # A mark may lie across two reads.
            found = answer.find(endpoint.mark, max(0, seen - len(endpoint.mark) + 1))
            seen = len(answer)
            if found >= 0:
                times.append(now)
    finally:
        writer.close()
    given, made = endpoint.tokens(bytes(answer))
    if not answer.startswith(b"HTTP/1.1 200") or made != max_tokens or given not in (length, -1):
        told = bytes(answer[:120] + b" ... " + answer[-400:]).decode("utf-8", "replace")
        raise RuntimeError(f"{made} of {max_tokens} tokens for {given} of {length}: {told}")
    share.requests += 1
    share.tokens += made
    share.reads += len(times)
    # Of made-up weights, all tokens of an answer may be without text: no event has any then.
    share.ttft += [first - started for first in times[:1]]
    share.itl += [later - earlier for earlier, later in itertools.pairwise(times)]
    if times and made > 1:
        share.tpot.append((times[-1] - times[0]) / (made - 1))
    return bytes(answer)
