"""One measured run: the target prepared, warmed up and put under load, on one event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cog_triton.bench import targets
from cog_triton.bench.http_client import Client, now
from cog_triton.bench.load_generator import LoadGenerator, Progress
from cog_triton.bench.options import Options
from cog_triton.bench.prompt_source import PromptSource
from cog_triton.bench.request_record import FAILED, OK, Record
from cog_triton.bench.targets.base import Target
from cog_triton.errors import NothingSucceeded

_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class GeneratorUsage:
    """Usage of one process: CPU seconds, wall seconds, and event-loop lags in seconds."""

    cpu: float
    wall: float
    lags: array[float]


class UsageMonitor:
    """Measures usage from `start` to `stop`; lag is that of a timer of 20 ms."""

    def __init__(self) -> None:
        self._lags = array("d")
        self._cpu = self._wall = self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring, within a running event loop."""
        self._cpu, self._wall = time.process_time(), now()
        self._arm()

    def stop(self) -> GeneratorUsage:
        """Stop measuring; returns the usage since `start`."""
        if self._timer is not None:
            self._timer.cancel()
        return GeneratorUsage(time.process_time() - self._cpu, now() - self._wall, self._lags)

    def _arm(self) -> None:
        self._due = now() + _PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._fire)

    def _fire(self) -> None:
        self._lags.append(max(0.0, now() - self._due))
        self._arm()


_LEAD_S = 0.05
_PROGRESS_S = 0.25
ProgressCallback = Callable[[Progress, float], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Records of one run; `started` and `ended`: first request due, last one ended."""

    records: list[Record]
    usage: GeneratorUsage
    notes: Sequence[str]
    started: float
    ended: float
    interrupted: bool

    @property
    def seconds(self) -> float:
        """Duration of the run, above 0."""
        return max(self.ended - self.started, 1e-9)


@asynccontextmanager
async def _prepared(options: Options) -> AsyncIterator[Target]:
    client = Client(options.timeout)
    try:
        target = targets.make(options, client)
        await target.prepare()
        yield target
    finally:
        client.close()


async def warm_up(options: Options) -> list[str]:
    """Prepare the target and send the warm-up requests; returns the target's notes.

    Raises what `Target.prepare` raises, and E2400 when a warm-up request fails.
    """
    async with _prepared(options) as target:
        prompts = PromptSource(options)
        records = [Record(index=-1 - number, scheduled=now()) for number in range(options.warmup)]
        await asyncio.gather(
            *(target.measure(prompts.get(record.index), record) for record in records)
        )
    failed = [record for record in records if record.status == FAILED]
    if failed:
        raise NothingSucceeded(
            f"the request that warms up failed ({failed[0].code}): {failed[0].error}"
            " (--warmup 0 measures all the same)"
        )
    return target.notes


async def measure(options: Options, show: ProgressCallback) -> RunResult:
    """Put the target under load; Ctrl-C ends it early and keeps its records.

    `show` gets the progress and the seconds since the start, a few times a second.
    """
    async with _prepared(options) as target:
        prompts = PromptSource(options)
        generator = LoadGenerator(options, target, prompts)
        prompts.prepare(generator.expected_requests())
        gc.freeze()  # prompts and options stay; collecting them again would only delay
        monitor, loop, at = UsageMonitor(), asyncio.get_running_loop(), now() + _LEAD_S
        loop.add_signal_handler(signal.SIGINT, generator.stop)
        showing = asyncio.create_task(_show(generator.progress, at, show))
        monitor.start()
        try:
            await generator.run(at)
        finally:
            usage = monitor.stop()
            showing.cancel()
            loop.remove_signal_handler(signal.SIGINT)
    records = sorted(generator.records, key=lambda record: record.index)
    ends = [record.ended for record in records if record.status in (OK, FAILED)]
    return RunResult(records, usage, target.notes, at, max(ends, default=at), generator.stopped)


async def _show(progress: Progress, started: float, show: ProgressCallback) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        show(progress, now() - started)
