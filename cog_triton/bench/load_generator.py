"""Load generator: prepares a target, sends it requests when they are due, and records each."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from cog_triton.bench.http_client import Client, now
from cog_triton.bench.options import Options, Prompt, Unit, make_prompt
from cog_triton.bench.request_record import CUT, FAILED, OK, Record
from cog_triton.bench.targets import KINDS, Target
from cog_triton.errors import NothingSucceeded

_MOST_ARRIVALS = 10_000_000
_FAILURE_PAUSE_S = 0.1
"""Pause of a user after a failure: one refused at once must not ask 10000 times a second."""
_BATCH_PAUSE_S = 1.0
_LAG_PERIOD_S = 0.02
_LEAD_S = 0.05
_PROGRESS_S = 5.0
_PREPARED = 2000


@dataclass(slots=True)
class LoadGenerator:
    """Load generator: `records` and the counts are filled while it runs.

    `tokens` are pieces of output, of the `done` requests.
    """

    options: Options
    target: Target
    done: int = 0
    failed: int = 0
    tokens: int = 0
    records: list[Record] = field(default_factory=list)
    stopped: bool = False
    _prompts: Sequence[Prompt] = ()
    _driver: asyncio.Task[None] | None = None
    _started: float = 0.0

    def prepare(self) -> None:
        """Make the first prompts, so that they take no time when they are due."""
        options = self.options
        count = options.requests or int(options.rate * 20)
        if options.requests is None and options.unit is Unit.RPS and options.duration:
            count = int(options.rate * options.duration * 1.2) + 1
        self._prompts = [make_prompt(options, index) for index in range(min(count, _PREPARED))]

    def progress(self) -> str:
        """Text of a line: seconds, requests and tokens so far."""
        options, seconds = self.options, max(now() - self._started, 1e-9)
        of = f" of {options.duration:g}" if options.duration else ""
        wanted = f" of {options.requests}" if options.requests else ""
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{options.rate:g} {options.unit.value}: {seconds:.0f}{of} s: {self.done}{wanted} done,"
            f" {len(self.records) - self.done} running{failed},"
            f" {self.tokens / seconds:.0f} output tokens/s"
        )

    def stop(self) -> None:
        """Stop: nothing more is sent, and requests in flight are cancelled."""
        self.stopped = True
        if self._driver is not None:
            self._driver.cancel()

    async def run(self, started: float) -> None:
        """Send all requests, starting at `started` of the monotonic clock; wait for the answers."""
        self._started = started
        drivers = {
            Unit.RPS: self._open_loop,
            Unit.BATCH: self._batches,
            Unit.CONCURRENCY: self._closed_loops,
        }
        self._driver = asyncio.create_task(drivers[self.options.unit]())
        try:
            await self._driver
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            if not self.stopped:
                raise

    async def _open_loop(self) -> None:
        """Open loop: due times are fixed in advance, so a slow server delays no request."""
        options = self.options
        due = offsets(options.rate, options.seed, options.duration, options.requests)
        async with asyncio.TaskGroup() as tasks:
            for index, after in enumerate(due):
                at = self._started + after
                await _sleep_until(at)
                tasks.create_task(self._send_one(index, at))

    async def _batches(self) -> None:
        """Batches of `rate` requests, with a pause after the last of each has ended."""
        index, size = 0, int(self.options.rate)
        await _sleep_until(self._started)
        while (count := min(size, self._remaining(index))) > 0 and not self._time_is_up(now()):
            at = now()
            async with asyncio.TaskGroup() as tasks:
                for number in range(index, index + count):
                    tasks.create_task(self._send_one(number, at))
            index += count
            if self._remaining(index) > 0:
                await asyncio.sleep(_BATCH_PAUSE_S)

    async def _closed_loops(self) -> None:
        """Closed loop: `rate` users, each of whom sends the next request once answered."""
        await _sleep_until(self._started)
        numbers = itertools.count()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(int(self.options.rate)):
                tasks.create_task(self._user(numbers))

    async def _user(self, numbers: Iterator[int]) -> None:
        due = self._started
        while not self._time_is_up(due) and self._remaining(index := next(numbers)) > 0:
            if (await self._send_one(index, due)).status == FAILED:
                await asyncio.sleep(_FAILURE_PAUSE_S)
            due = now()

    async def _send_one(self, index: int, due: float) -> Record:
        record = Record(index=index, scheduled=due)
        self.records.append(record)
        ready = index < len(self._prompts)
        prompt = self._prompts[index] if ready else make_prompt(self.options, index)
        try:
            await self.target.measure(prompt, record)
        finally:
            self.done += 1
            self.failed += record.status == FAILED
            if record.status != CUT:
                self.tokens += record.output_tokens or record.pieces
        return record

    def _remaining(self, index: int) -> int:
        return (1 << 62 if self.options.requests is None else self.options.requests) - index

    def _time_is_up(self, at: float) -> bool:
        return self.options.duration is not None and at - self._started >= self.options.duration


async def _sleep_until(at: float) -> None:
    if (left := at - now()) > 0:
        await asyncio.sleep(left)


def offsets(
    rate: float, seed: int, duration: float | None = None, requests: int | None = None
) -> array[float]:
    """Due times in seconds from the start, at `rate` requests a second.

    They end before `duration` seconds, and are at most `requests`. Gaps are independent and
    exponentially distributed, as those of many users who know nothing of each other.
    """
    random = Random(seed)
    found = array("d")
    end = float("inf") if duration is None else duration
    at = random.expovariate(rate)
    while at < end and len(found) < (_MOST_ARRIVALS if requests is None else requests):
        found.append(at)
        at += random.expovariate(rate)
    return found


@dataclass(slots=True)
class GeneratorUsage:
    """Usage of this process from `start` to `stop`: CPU and wall seconds, lags of a 20 ms timer."""

    cpu: float = 0.0
    wall: float = 0.0
    lags: array[float] = field(default_factory=lambda: array("d"))
    _due: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring, within a running event loop."""
        self.cpu, self.wall = -time.process_time(), -now()
        self._arm()

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
        self.cpu += time.process_time()
        self.wall += now()

    def _arm(self) -> None:
        self._due = now() + _LAG_PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(_LAG_PERIOD_S, self._fire)

    def _fire(self) -> None:
        self.lags.append(max(0.0, now() - self._due))
        self._arm()


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


async def measure(options: Options, echo: Callable[[str], None]) -> RunResult:
    """Put the target under load; Ctrl-C ends it early and keeps its records.

    `echo` gets a line of the progress every few seconds.

    Raises what `Target.prepare` raises, and E2400 when a request that warms up fails.
    """
    client = Client(options.timeout)
    try:
        target = KINDS[options.target](options, client)
        await target.prepare()
        await _warm_up(target)
        client.close()  # connecting is part of what is measured
        return await _measured(LoadGenerator(options, target), echo)
    finally:
        client.close()


async def _warm_up(target: Target) -> None:
    options = target.options
    records = [Record(index=-1 - number, scheduled=now()) for number in range(options.warmup)]
    sent = (target.measure(make_prompt(options, record.index), record) for record in records)
    await asyncio.gather(*sent)
    for record in records:
        if record.status == FAILED:
            raise NothingSucceeded(
                f"the request that warms up failed ({record.code}): {record.error}"
                " (--warmup 0 measures all the same)"
            )


async def _measured(generator: LoadGenerator, echo: Callable[[str], None]) -> RunResult:
    generator.prepare()
    gc.freeze()  # prompts and options stay; collecting them again would only delay
    usage, loop, at = GeneratorUsage(), asyncio.get_running_loop(), now() + _LEAD_S
    loop.add_signal_handler(signal.SIGINT, generator.stop)
    showing = asyncio.create_task(_show(generator, echo))
    usage.start()
    try:
        await generator.run(at)
    finally:
        usage.stop()
        showing.cancel()
        loop.remove_signal_handler(signal.SIGINT)
    records = sorted(generator.records, key=lambda record: record.index)
    ends = [record.ended for record in records if record.status in (OK, FAILED)]
    notes = generator.target.notes
    return RunResult(records, usage, notes, at, max(ends, default=at), generator.stopped)


async def _show(generator: LoadGenerator, echo: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        echo(generator.progress())
