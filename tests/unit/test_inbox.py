"""Inboxes: many threads put, a thread or an event loop takes all of it in order."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cog_triton.engines.step_items import StepItem
from cog_triton.serving.inbox import Inbox, LoopInbox, LoopInboxes

THREADS, COUNT = 4, 500


def item(handle: int, offset: int = 0) -> StepItem:
    return StepItem(handle, 0, offset, [1], [])


@contextmanager
def putting(put: Callable[[int], None], threads: int = THREADS) -> Iterator[None]:
    """Threads that each call `put` with their number."""
    running = [threading.Thread(target=put, args=[number]) for number in range(threads)]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join()


def hammer(inbox: Inbox) -> Callable[[int], None]:
    def put(number: int) -> None:
        for offset in range(COUNT):
            inbox.put(item(number, offset))
            if offset % 7 == 0:
                inbox.put(None)

    return put


def check(found: list[StepItem]) -> None:
    for number in range(THREADS):
        offsets = [one.offset for one in found if one.handle == number]
        assert offsets == list(range(COUNT))


@pytest.mark.parametrize("timeout", [None, 5.0, 0.0])
def test_an_event_loop_gets_everything_in_order(timeout: float | None) -> None:
    async def take() -> list[StepItem]:
        inbox = LoopInboxes().new()
        found: list[StepItem] = []
        with putting(hammer(inbox)):
            while len(found) < THREADS * COUNT:
                found += await inbox.take(timeout) or ()
        return found

    check(asyncio.run(take()))


def test_inboxes_of_a_loop_are_separate() -> None:
    async def take_one(inbox: LoopInbox) -> list[StepItem]:
        found: list[StepItem] = []
        while len(found) < THREADS * COUNT:
            found += await inbox.take() or ()
        return found

    async def take_all() -> list[list[StepItem]]:
        inboxes = LoopInboxes()
        made = [inboxes.new() for _ in range(20)]

        def put(number: int) -> None:
            for offset in range(COUNT):
                for inbox in made:
                    inbox.put(item(number, offset))

        with putting(put):
            return await asyncio.gather(*map(take_one, made))

    for found in asyncio.run(take_all()):
        check(found)


def test_inboxes_of_a_step_are_woken_in_one_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def take() -> int:
        inboxes, loop = LoopInboxes(), asyncio.get_running_loop()
        made = [inboxes.new() for _ in range(50)]
        readers = [asyncio.ensure_future(inbox.take()) for inbox in made]
        await asyncio.sleep(0)  # all wait now
        calls = 0
        call_soon = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal calls
            calls += 1
            return call_soon(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for handle, inbox in enumerate(made):
            inbox.put(item(handle))
        assert await asyncio.gather(*readers) == [[item(handle)] for handle in range(50)]
        return calls

    assert asyncio.run(take()) == 1


def test_an_event_loop_waits_no_longer_than_the_timeout() -> None:
    async def take() -> None:
        inbox = LoopInboxes().new()
        assert await inbox.take(0) is None
        assert await inbox.take(0.01) is None
        inbox.put(item(1))
        assert await inbox.take(0) == [item(1)]
        inbox.put(None)
        assert await inbox.take(60) == []

    asyncio.run(take())


def test_a_late_wake_up_is_no_timeout() -> None:
    async def take() -> None:
        inbox = LoopInboxes().new()
        inbox.put(item(1))
        assert await inbox.take(60) == [item(1)]  # before the loop could wake anyone
        asyncio.get_running_loop().call_later(0.02, inbox.put, item(2))
        assert await inbox.take(60) == [item(2)]

    asyncio.run(take())


def test_a_closed_loop_takes_no_more_and_raises_nothing() -> None:
    async def make() -> LoopInbox:
        return LoopInboxes().new()

    inbox = asyncio.run(make())
    for _ in range(3):
        inbox.put(item(1))


def test_what_comes_is_handled_without_waking_the_task() -> None:
    async def run() -> None:
        inboxes = LoopInboxes()
        inbox = inboxes.new()
        name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")
        found: list[list[StepItem]] = []

        def arrived() -> bool:
            assert name.get() == "a task's"
            found.append(inbox.take_now())
            return found[-1][-1].offset < 3

        async def wait() -> None:
            name.set("a task's")
            await inbox.handle(arrived)

        inbox.put(item(1, 0))
        waiting = asyncio.ensure_future(wait())
        for offset in range(1, 4):
            await asyncio.sleep(0.01)
            assert [one[0].offset for one in found] == list(range(offset))
            assert not waiting.done()
            inbox.put(item(1, offset))
        await asyncio.wait_for(waiting, 60)
        inbox.put(item(1, 4))
        assert await inbox.take() == [item(1, 4)], "it is handled no more"
        assert len(found) == 4

    asyncio.run(run())


def test_handling_ends_with_its_task() -> None:
    async def run() -> None:
        inbox = LoopInboxes().new()
        waiting = asyncio.ensure_future(inbox.handle(lambda: bool(inbox.take_now())))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        inbox.put(item(1))
        assert await inbox.take() == [item(1)]

    asyncio.run(run())
