"""Sending of streams: a client that reads too slowly, and one that leaves meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from cog_triton.serving.openai.streaming import _BegunSend


def test_a_send_that_waits_goes_on_in_the_task_that_awaits_it() -> None:
    async def run() -> None:
        room, sent = asyncio.Event(), []

        async def send(text: str) -> None:
            await room.wait()
            sent.append(text)

        loop = asyncio.get_running_loop()
        begun: asyncio.Future[_BegunSend | None] = loop.create_future()
        loop.call_soon(lambda: begun.set_result(_BegunSend.begin(send("a"))))
        waits = await begun
        assert waits is not None
        task = asyncio.ensure_future(_awaited(waits))
        await asyncio.sleep(0.01)
        assert not task.done()
        room.set()
        await asyncio.wait_for(task, 60)
        assert sent == ["a"]
        assert _BegunSend.begin(send("b")) is None
        assert sent == ["a", "b"]

    asyncio.run(run())


def test_a_send_that_waits_ends_with_its_task() -> None:
    async def run() -> None:
        ended = []

        async def send() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        waits = _BegunSend.begin(send())
        assert waits is not None
        task = asyncio.ensure_future(_awaited(waits))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(run())


async def _awaited(begun: _BegunSend) -> None:
    await begun
