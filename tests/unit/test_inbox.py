"""Inboxes: many threads put, a thread or an event loop takes; nothing is lost, order is kept."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from cog_triton.engines.step_items import STOP, StepItem
from cog_triton.serving import inbox as inbox_module
from cog_triton.serving.inbox import Inbox, LoopInbox, LoopInboxes, ThreadInbox, ThreadInboxes

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


def test_a_thread_gets_everything_in_order() -> None:
    inbox = ThreadInbox()
    found: list[StepItem] = []
    with putting(hammer(inbox)):
        while len(found) < THREADS * COUNT:
            found += inbox.take()
    check(found)


def test_a_thread_takes_all_that_has_come() -> None:
    inbox = ThreadInbox()
    for offset in range(3):
        inbox.put(item(1, offset))
        inbox.put(None)
    assert inbox.take() == [item(1, 0), item(1, 1), item(1, 2)]
    inbox.put(None)
    assert inbox.take() == []


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


class Clock:
    """Stands for the module `time`: stands still, and tells how long a thread wants to sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: SimpleQueue[float] = SimpleQueue()
        self.go_on = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.put(seconds)
        assert self.go_on.acquire(timeout=60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(inbox_module, "time", made)
    return made


def busy(inboxes: ThreadInboxes, clock: Clock) -> None:
    """Let 2500 items a second come, of an inbox that holds none of them back."""
    for _ in range(2):
        for _ in range(64):
            inboxes.new().put(item(9))
            clock.now += 0.0004


def waits(inbox: ThreadInbox) -> bool:
    return inbox._queue.empty()


def test_items_of_a_busy_server_are_held_back_until_20_ms_after_the_last(clock: Clock) -> None:
    inboxes = ThreadInboxes()
    busy(inboxes, clock)
    one, other = inboxes.new(), inboxes.new()
    one.put(item(1, 0))
    assert one.take() == [item(1, 0)], "the first is not"
    clock.now += 0.005
    one.put(item(1, 1))
    assert waits(one)
    assert clock.slept.get(timeout=60) == pytest.approx(0.015)
    other.put(item(2, 0))
    assert other.take() == [item(2, 0)]
    other.put(item(2, 1))
    one.put(item(1, 2))
    assert waits(one)
    clock.go_on.release()
    assert one.take() == [item(1, 1), item(1, 2)]
    assert other.take() == [item(2, 1)]
    clock.now += 0.025
    one.put(item(1, 3))
    assert one.take() == [item(1, 3)], "the last was long ago"


@pytest.mark.parametrize("urgent", [None, item(1, 2)._replace(end=STOP)])
def test_an_end_and_a_wake_up_take_along_what_is_held(
    clock: Clock, urgent: StepItem | None
) -> None:
    inboxes = ThreadInboxes()
    busy(inboxes, clock)
    inbox = inboxes.new()
    inbox.put(item(1, 0))
    inbox.put(item(1, 1))
    inbox.put(urgent)
    ends = [] if urgent is None else [urgent]
    assert inbox.take() == [item(1, 0), item(1, 1), *ends]
    clock.go_on.release()  # and is not given twice
    assert clock.slept.get(timeout=60) == pytest.approx(0.02)
    assert waits(inbox)


def test_nothing_is_held_back_while_little_comes(clock: Clock) -> None:
    inboxes = ThreadInboxes()
    inbox = inboxes.new()
    for offset in range(200):
        inbox.put(item(1, offset))
        assert inbox.take() == [item(1, offset)]
        clock.now += 0.001


def test_threads_of_busy_inboxes_get_everything_in_order() -> None:
    inboxes = ThreadInboxes()
    made = [inboxes.new() for _ in range(8)]
    found: list[list[StepItem]] = [[] for _ in made]

    def take(place: int) -> None:
        while len(found[place]) < 2000:
            found[place] += made[place].take()

    readers = [threading.Thread(target=take, args=[place]) for place in range(len(made))]
    for reader in readers:
        reader.start()
    for offset in range(2000):
        for inbox in made:
            inbox.put(item(1, offset))
    for reader in readers:
        reader.join(30)
    assert all([one.offset for one in each] == list(range(2000)) for each in found)
