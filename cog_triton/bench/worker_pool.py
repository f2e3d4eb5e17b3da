"""The load generator's processes, seen from the one that shows and reports."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cog_triton.bench import targets
from cog_triton.bench.http_client import Client, now
from cog_triton.bench.load_generator import Progress
from cog_triton.bench.options import Options
from cog_triton.bench.prompt_source import Prompts
from cog_triton.bench.request_record import FAILED, OK, Record
from cog_triton.bench.self_monitor import Load
from cog_triton.bench.worker_protocol import Frame, Ready, Result, Start, Stop, Task, encode, read
from cog_triton.errors import CogTritonError, GenericError, NothingSucceeded

_LEAD_S = 0.05
_CUT_S = 10.0
Show = Callable[[Progress, float], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured; `started` and `ended` are when the first was due and the last ended."""

    records: list[Record]
    loads: Sequence[Load]
    notes: Sequence[str]
    started: float
    ended: float
    interrupted: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(self.ended - self.started, 1e-9)


async def warm_up(options: Options) -> list[str]:
    """Find the target and send it the warm-up requests; returns its notes.

    Raises what `Target.prepare` raises, and E2400 when a warm-up request fails.
    """
    client = Client(options.timeout)
    try:
        target = targets.make(options, client)
        await target.prepare()
        prompts = Prompts(options)
        records = [Record(index=-1 - number, scheduled=now()) for number in range(options.warmup)]
        await asyncio.gather(
            *(target.measure(prompts.get(record.index), record) for record in records)
        )
    finally:
        client.close()
    failed = [record for record in records if record.status == FAILED]
    if failed:
        raise NothingSucceeded(
            f"the request that warms up failed ({failed[0].code}): {failed[0].error}"
            " (--warmup 0 measures all the same)"
        )
    return target.notes


async def measure(options: Options, show: Show) -> Run:
    """Run the load in processes of its own; Ctrl-C ends it early, with what there is.

    `show` gets the progress of all and the seconds since the start, a few times a second.
    """
    workers = [_Worker(options, part) for part in range(options.processes)]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        for worker in workers:
            await worker.start()
        for worker in workers:
            await worker.ready()
        at = now() + _LEAD_S
        for worker in workers:
            worker.send(Start(at))
        showing = asyncio.create_task(_show(workers, at, show))
        stopping = asyncio.create_task(_stop(workers, stop))
        try:
            results = await asyncio.gather(*(worker.result() for worker in workers))
        finally:
            showing.cancel()
            stopping.cancel()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        for worker in workers:
            await worker.end()
    records = sorted(
        (record for result in results for record in result.records), key=lambda item: item.index
    )
    ends = [record.ended for record in records if record.status in (OK, FAILED)]
    notes = dict.fromkeys(note for result in results for note in result.notes)
    loads = [result.load for result in results]
    return Run(records, loads, list(notes), at, max(ends, default=at), stop.is_set())


async def _show(workers: Sequence[_Worker], started: float, show: Show) -> None:
    while True:
        await asyncio.sleep(0.25)
        parts = [worker.progress for worker in workers]
        total = Progress(
            sum(part.sent for part in parts),
            sum(part.done for part in parts),
            sum(part.failed for part in parts),
            sum(part.tokens for part in parts),
        )
        show(total, now() - started)


async def _stop(workers: Sequence[_Worker], stop: asyncio.Event) -> None:
    await stop.wait()
    for worker in workers:
        worker.send(Stop())
    await asyncio.sleep(_CUT_S)
    for worker in workers:
        worker.kill()


class _Worker:
    def __init__(self, options: Options, part: int) -> None:
        self._task = Task(options, part, options.processes)
        self._process: asyncio.subprocess.Process | None = None
        self.progress = Progress()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "cog_triton.bench.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self.send(self._task)

    def send(self, frame: Frame) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(encode(frame))

    async def ready(self) -> None:
        frame = await self._frame()
        assert isinstance(frame, Ready)

    async def result(self) -> Result:
        while True:
            frame = await self._frame()
            if isinstance(frame, Result):
                return frame
            assert isinstance(frame, Progress)
            self.progress = frame

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CUT_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _frame(self) -> Frame:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            frame: Frame = await read(self._process.stdout)
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            raise GenericError(f"the load generator ended with exit code {code}") from None
        if isinstance(frame, CogTritonError):
            raise frame
        return frame
