"""Closed-loop load on one endpoint from several processes: fixed concurrency, timed per read.

Definitions: TTFT is from the moment before a request is sent to its first event with text. ITL are
the times between reads that brought text, of one stream; what comes in one read came at once. TPOT
is (end - first) / (tokens - 1) of a request. Percentiles are interpolated. Tokens a second are all
output tokens over the time from the first request sent to the last answer read. Goodput are the
requests a second whose TTFT and TPOT were within `SLO`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from endpoints import Endpoint
from prompts import Prompt

from cog_triton.bench.http_client import BufferedResponse, Client, TransportError, now
from cog_triton.bench.load_generator import GeneratorUsage
from cog_triton.bench.request_record import Record
from cog_triton.bench.run_metrics import summarize

SLO = {"ttft_s": 2.0, "tpot_s": 0.03}
_TIMEOUT_S = 240
_START_S = 60


@dataclass
class WorkerResult:
    """Measurements of one load process; times in seconds, `lags` of its own event loop."""

    records: list[Record] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    processor: float = 0.0
    began: float = 0.0
    ended: float = 0.0


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
    errors = [error for share in shares for error in share.errors]
    ran = [share for share in shares if share.ended]
    if not ran:
        raise RuntimeError("; ".join(errors))
    seconds = max(share.ended for share in ran) - min(share.began for share in ran)
    records = [record for share in ran for record in share.records]
    tokens = sum(record.output_tokens or 0 for record in records)
    reads = sum(record.pieces for record in records)
    ttft_mean, ttft_p50, ttft_p99 = _ms(record.ttft for record in records)
    _, itl_p50, itl_p99 = _ms(gap for record in records for gap in record.gaps())
    _, tpot_p50, tpot_p99 = _ms(record.tpot for record in records)
    return LoadResult(
        endpoint,
        concurrency,
        len(records),
        round(tokens / seconds, 1),
        round(seconds, 6),
        ttft_mean,
        ttft_p50,
        ttft_p99,
        itl_p50,
        itl_p99,
        tpot_p50,
        tpot_p99,
        round(sum(map(_within_slo, records)) / seconds, 2),
        round(tokens / reads, 2) if reads else 0.0,
        len(shares),
        _ms(lag for share in ran for lag in share.lags)[2],
        round(sum(share.processor for share in shares) / seconds, 2),
        errors[:5],
    )


def _within_slo(record: Record) -> bool:
    """Whether a request of several tokens has a TTFT and a TPOT within the SLO."""
    ttft, tpot = record.ttft, record.tpot
    return (
        ttft is not None and tpot is not None and (ttft <= SLO["ttft_s"] and tpot <= SLO["tpot_s"])
    )


def _ms(values: Iterable[float | None]) -> tuple[float, float, float]:
    """Mean, p50 and p99 of seconds, in milliseconds; 0 of none."""
    if (found := summarize(values)) is None:
        return 0.0, 0.0, 0.0
    return round(1000 * found.mean, 3), round(1000 * found.p50, 3), round(1000 * found.p99, 3)


def _process(
    pipe: Any,
    barrier: Any,
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    slots: int,
    max_tokens: int,
) -> None:
    gc.disable()
    barrier.wait(_START_S)
    pipe.send(asyncio.run(_load(endpoint, prompts, slots, max_tokens)))


async def _load(
    endpoint: Endpoint, prompts: Sequence[Prompt], slots: int, max_tokens: int
) -> WorkerResult:
    share, usage, waiting = WorkerResult(), GeneratorUsage(), iter(prompts)

    async def slot() -> None:
        for prompt in waiting:
            try:
                share.records.append((await ask(endpoint, prompt, max_tokens))[0])
            except (TransportError, RuntimeError) as error:
                share.errors.append(f"{type(error).__name__}: {error}")

    usage.start()
    share.began = now()
    await asyncio.gather(*(slot() for _ in range(slots)))
    share.ended = now()
    usage.stop()
    share.processor, share.lags = usage.cpu, list(usage.lags)
    return share


class Reads(BufferedResponse):
    """Answer with the times of the reads that brought text."""

    def __init__(self, mark: bytes) -> None:
        """`mark` is in every event with text."""
        super().__init__()
        self.mark = mark
        self.times: list[float] = []

    def body(self, data: bytes, at: float) -> None:
        """See `BufferedResponse.body`; a mark may lie across two reads."""
        before = max(0, len(self.text) - len(self.mark) + 1)
        super().body(data, at)
        if self.text.find(self.mark, before) >= 0:
            self.times.append(at)

    @property
    def pause(self) -> float:
        """The longest time between two of these reads, in seconds."""
        pairs = itertools.pairwise(self.times)
        return max((later - earlier for earlier, later in pairs), default=0.0)


async def read(
    endpoint: Endpoint, prompt: Prompt, max_tokens: int, answer: Reads, timeout: float
) -> None:
    """Send one request on a connection of its own, and read its answer; raises TransportError."""
    client = Client(timeout)
    try:
        await client.send(*endpoint.request(prompt, max_tokens), answer)
    finally:
        client.close()


async def ask(
    endpoint: Endpoint, prompt: Prompt, max_tokens: int, timeout: float = _TIMEOUT_S
) -> tuple[Record, bytes]:
    """Send one request; returns its record, and its answer.

    Raises RuntimeError unless the answer has exactly `max_tokens` tokens, and TransportError.
    """
    answer, began = Reads(endpoint.mark), now()
    await read(endpoint, prompt, max_tokens, answer, timeout)
    given, made = endpoint.tokens(answer.text)
    if answer.status != 200 or made != max_tokens or given not in (len(prompt.ids), -1):
        text = (answer.text[:120] + b" ... " + answer.text[-400:]).decode("utf-8", "replace")
        raise RuntimeError(
            f"{made} of {max_tokens} tokens for {given} of {len(prompt.ids)}:"
            f" HTTP {answer.status} {text}"
        )
    record = Record(0, began, sent=began, ended=now(), output_tokens=made)
    for at in answer.times:
        record.output(at, 1)
    return record, answer.text
