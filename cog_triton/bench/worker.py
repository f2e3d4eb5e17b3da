"""Load generator process: ``python -m cog_triton.bench.worker``, controlled through stdin.

Generating load in a process of its own keeps the display and everything else off its event loop.
When stdin ends, the parent has died or wants an end, and so does this.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from contextlib import suppress

from cog_triton.bench import targets
from cog_triton.bench.generator_usage import UsageMonitor
from cog_triton.bench.http_client import Client
from cog_triton.bench.load_generator import LoadGenerator, Progress
from cog_triton.bench.prompt_source import PromptSource
from cog_triton.bench.worker_protocol import Message, Ready, Result, Task, encode, read
from cog_triton.errors import CogTritonError

_PROGRESS_S = 0.25


def _send(message: Message) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


async def _generate(task: Task, reader: asyncio.StreamReader) -> Result:
    client = Client(task.options.timeout)
    target = targets.make(task.options, client)
    await target.prepare()
    prompts = PromptSource(task.options)
    generator = LoadGenerator(task.options, target, prompts, task.part, task.parts)
    prompts.prepare(generator.expected_requests())
    gc.freeze()  # prompts and options stay; collecting them again would only delay
    _send(Ready())
    start = await read(reader)
    monitor = UsageMonitor()
    background = [
        asyncio.create_task(_report_progress(generator.progress)),
        asyncio.create_task(_wait_for_stop(reader, generator)),
    ]
    monitor.start()
    try:
        await generator.run(start.at)
        return Result(generator.records, monitor.stop(), target.notes)
    finally:
        for item in background:
            item.cancel()
        client.close()


async def _report_progress(progress: Progress) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        _send(progress)


async def _wait_for_stop(reader: asyncio.StreamReader, generator: LoadGenerator) -> None:
    """Stop when the parent says so, or ends."""
    with suppress(asyncio.IncompleteReadError):
        await read(reader)
    generator.stop()


async def _main() -> None:
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    task = await read(reader)
    try:
        _send(await _generate(task, reader))
    except CogTritonError as error:
        _send(error)
    except (asyncio.IncompleteReadError, BrokenPipeError):
        return  # the parent is gone


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main())
