"""Load generator: sends requests when they are due, and records each."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from cog_triton.bench.http_client import now
from cog_triton.bench.options import Arrival, Options, Unit
from cog_triton.bench.prompt_source import PromptSource
from cog_triton.bench.request_record import CUT, FAILED, Record
from cog_triton.bench.targets.base import Target

_MOST_ARRIVALS = 10_000_000
_FAILURE_PAUSE_S = 0.1
"""Pause of a user after a failure: one refused at once must not ask 10000 times a second."""


@dataclass(slots=True)
class Progress:
    """Progress of the load; `tokens` are pieces of output."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def running(self) -> int:
        """Requests in flight."""
        return self.sent - self.done


@dataclass(slots=True)
class LoadGenerator:
    """Load generator: `records` and `progress` are filled while it runs."""

    options: Options
    target: Target
    prompts: PromptSource
    progress: Progress = field(default_factory=Progress)
    records: list[Record] = field(default_factory=list)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _started: float = 0.0

    def expected_requests(self) -> int:
        """Estimated number of requests, at most 2000: how many prompts to prepare."""
        options = self.options
        if options.requests is not None:
            return min(options.requests, 2000)
        assert options.duration is not None
        if options.unit is Unit.RPS:
            return min(int(options.rate * options.duration * 1.2) + 1, 2000)
        return min(int(options.rate) * 20, 2000)

    @property
    def stopped(self) -> bool:
        """Whether `stop` has ended it early."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Stop: nothing more is sent, and requests in flight are cancelled."""
        self._stopped.set()

    async def run(self, started: float) -> None:
        """Send all requests, starting at `started` of the monotonic clock; wait for the answers."""
        self._started = started
        drivers = {
            Unit.RPS: self._open_loop,
            Unit.BATCH: self._batches,
            Unit.CONCURRENCY: self._closed_loops,
        }
        driver = asyncio.create_task(drivers[self.options.unit]())
        stopping = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({driver, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        driver.cancel()
        tasks = [driver, *self._tasks]
        if self.stopped:
            for task in tasks:
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _open_loop(self) -> None:
        """Open loop: due times are fixed in advance, so a slow server delays no request."""
        options = self.options
        due = offsets(
            options.rate,
            poisson=options.arrival is Arrival.POISSON,
            seed=options.seed,
            duration=options.duration,
            requests=options.requests,
        )
        for index, after in enumerate(due):
            at = self._started + after
            await _sleep_until(at)
            self._spawn(self._send_one(index, at))
        await self._wait_for_all()

    async def _batches(self) -> None:
        """Batches of `rate` requests, with a pause after the last of each has ended."""
        index, size = 0, int(self.options.rate)
        await _sleep_until(self._started)
        while True:
            count = min(size, self._remaining(index))
            if count <= 0 or self._time_is_up(now()):
                return
            at = now()
            for number in range(index, index + count):
                self._spawn(self._send_one(number, at))
            index += count
            await self._wait_for_all()
            if self._remaining(index) > 0:
                refused = self.records[-1].status == FAILED
                await asyncio.sleep(
                    max(self.options.batch_pause, _FAILURE_PAUSE_S if refused else 0.0)
                )

    async def _closed_loops(self) -> None:
        """Closed loop: `rate` users, each of whom sends the next request once answered."""
        await _sleep_until(self._started)
        numbers = itertools.count()
        for _ in range(int(self.options.rate)):
            self._spawn(self._user(numbers))
        await self._wait_for_all()

    async def _user(self, numbers: Iterator[int]) -> None:
        due = self._started
        while not self._time_is_up(due):
            index = next(numbers)
            if self._remaining(index) <= 0:
                return
            if (await self._send_one(index, due)).status == FAILED:
                await asyncio.sleep(_FAILURE_PAUSE_S)
            due = now()

    async def _send_one(self, index: int, due: float) -> Record:
        record = Record(index=index, scheduled=due)
        self.records.append(record)
        self.progress.sent += 1
        try:
            await self.target.measure(self.prompts.get(index), record)
        finally:
            self.progress.done += 1
            self.progress.failed += record.status == FAILED
            self.progress.tokens += 0 if record.status == CUT else record.tokens or record.pieces
        return record

    def _remaining(self, index: int) -> int:
        return (1 << 62 if self.options.requests is None else self.options.requests) - index

    def _time_is_up(self, at: float) -> bool:
        return self.options.duration is not None and at - self._started >= self.options.duration

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._discard)

    def _discard(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    async def _wait_for_all(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)


async def _sleep_until(at: float) -> None:
    if (left := at - now()) > 0:
        await asyncio.sleep(left)


def lateness(records: list[Record]) -> array[float]:
    """Delay of each request's sending after it was due, in seconds."""
    return array("d", (record.sent - record.scheduled for record in records if record.sent))


def offsets(
    rate: float, *, poisson: bool, seed: int, duration: float | None, requests: int | None
) -> array[float]:
    """Arrival schedule at `rate` requests a second: due times in seconds from the start.

    They end before `duration` seconds, and are at most `requests`.

    Poisson arrivals have independent, exponentially distributed gaps, as those of many users who
    know nothing of each other; constant ones are 1/rate apart. One of the limits is given.
    """
    random = Random(seed)
    found = array("d")
    end = float("inf") if duration is None else duration
    at = random.expovariate(rate) if poisson else 0.0
    while at < end and len(found) < (_MOST_ARRIVALS if requests is None else requests):
        found.append(at)
        at = at + random.expovariate(rate) if poisson else len(found) / rate
    return found
