"""Inbox of a request: all that comes in a turn of the loop is read in the next, in order."""

from __future__ import annotations

import asyncio
import contextvars

import pytest
from small_front import on_loop

from cog_triton.engines.step_items import StepItem
from cog_triton.serving.inbox import Inbox


def item(offset: int = 0) -> StepItem:
    return StepItem(1, 0, offset, [1], [])


def offsets(items: list[StepItem] | None) -> list[int]:
    return [one.offset for one in items or ()]


@on_loop
async def test_all_that_has_come_is_read_at_once_and_in_order() -> None:
    inbox, turns = Inbox(), 0
    reading = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    for offset in range(99):
        inbox.put(item(offset))
        inbox.put(None)
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert offsets(reading.result()) == list(range(99))
    assert turns < 5


@on_loop
async def test_it_waits_no_longer_than_the_timeout() -> None:
    inbox = Inbox()
    assert await inbox.take(0) is None
    assert await inbox.take(0.01) is None
    inbox.put(item(1))
    assert await inbox.take(0) == [item(1)]
    inbox.put(None)
    assert await inbox.take(60) == []


@on_loop
async def test_a_late_wake_up_is_no_timeout() -> None:
    inbox = Inbox()
    inbox.put(item(1))
    assert await inbox.take(60) == [item(1)]  # before the loop could wake anyone
    asyncio.get_running_loop().call_later(0.02, inbox.put, item(2))
    assert await inbox.take(60) == [item(2)]


@on_loop
async def test_what_comes_is_handled_without_waking_the_task() -> None:
    inbox = Inbox()
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")
    found: list[list[StepItem]] = []

    def arrived() -> bool:
        assert name.get() == "a task's"
        found.append(inbox.take_now())
        return found[-1][-1].offset < 3

    async def wait() -> None:
        name.set("a task's")
        await inbox.handle(arrived)

    inbox.put(item(0))
    waiting = asyncio.ensure_future(wait())
    for offset in range(1, 4):
        await asyncio.sleep(0.01)
        assert [one[0].offset for one in found] == list(range(offset))
        assert not waiting.done()
        inbox.put(item(offset))
    await asyncio.wait_for(waiting, 60)
    inbox.put(item(4))
    assert await inbox.take() == [item(4)], "it is handled no more"
    assert len(found) == 4


@on_loop
async def test_handling_ends_with_its_task() -> None:
    inbox = Inbox()
    waiting = asyncio.ensure_future(inbox.handle(lambda: bool(inbox.take_now())))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    inbox.put(item(1))
    assert await inbox.take() == [item(1)]
