"""Pool of load generator processes, controlled by the process that reports."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cog_triton.bench import targets
from cog_triton.bench.generator_usage import GeneratorUsage
from cog_triton.bench.http_client import Client, now
from cog_triton.bench.load_generator import Progress
from cog_triton.bench.options import Options
from cog_triton.bench.prompt_source import PromptSource
from cog_triton.bench.request_record import FAILED, OK, Record
from cog_triton.bench.worker_protocol import Message, Ready, Result, Start, Stop, Task, encode, read
from cog_triton.errors import CogTritonError, GenericError, NothingSucceeded

_LEAD_S = 0.05
_STOP_TIMEOUT_S = 10.0
ProgressCallback = Callable[[Progress, float], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Records of one run; `started` and `ended`: first request due, last one ended."""

    records: list[Record]
    usages: Sequence[GeneratorUsage]
    notes: Sequence[str]
    started: float
    ended: float
    interrupted: bool

    @property
    def seconds(self) -> float:
        """Duration of the run, above 0."""
        return max(self.ended - self.started, 1e-9)


async def warm_up(options: Options) -> list[str]:
    """Prepare the target and send the warm-up requests; returns the target's notes.

    Raises what `Target.prepare` raises, and E2400 when a warm-up request fails.
    """
    client = Client(options.timeout)
    try:
        target = targets.make(options, client)
        await target.prepare()
        prompts = PromptSource(options)
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


async def measure(options: Options, show: ProgressCallback) -> RunResult:
    """Run the load in worker processes; Ctrl-C ends it early and keeps its records.

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
    usages = [result.usage for result in results]
    return RunResult(records, usages, list(notes), at, max(ends, default=at), stop.is_set())


async def _show(workers: Sequence[_Worker], started: float, show: ProgressCallback) -> None:
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
    await asyncio.sleep(_STOP_TIMEOUT_S)
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

    def send(self, message: Message) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(encode(message))

    async def ready(self) -> None:
        message = await self._message()
        assert isinstance(message, Ready)

    async def result(self) -> Result:
        while True:
            message = await self._message()
            if isinstance(message, Result):
                return message
            assert isinstance(message, Progress)
            self.progress = message

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _message(self) -> Message:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            message: Message = await read(self._process.stdout)
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            raise GenericError(f"the load generator ended with exit code {code}") from None
        if isinstance(message, CogTritonError):
            raise message
        return message
