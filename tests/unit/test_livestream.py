"""A stream is live, joined, cancellable; its loop runs in a thread, its reader in another."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from types import GeneratorType
from typing import Any

import pytest
from cog import CancelationException

from cog_triton.errors import TritonUnavailable
from cog_triton.serving import livestream

PATIENCE_S = 10


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", asyncio.run_coroutine_threadsafe)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    livestream.install()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class Source:
    """Chunks that come when the test says so; `closed` is set when the iteration is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.closed = threading.Event()

    def send(self, *items: str | Exception | None) -> None:
        """Hand over items, all within one turn of the loop; return when they are taken."""

        async def put() -> None:
            for item in items:
                self._queue.put_nowait(item)

        asyncio.run_coroutine_threadsafe(put(), self._loop).result(PATIENCE_S)

    async def chunks(self) -> AsyncIterator[str]:
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed.set()


def start(loop: asyncio.AbstractEventLoop, source: Source) -> tuple[Any, Iterator[str]]:
    """What coglet does: the future of a coroutine that returns the live stream."""

    async def run() -> Iterator[str]:
        return livestream.live(source.chunks())

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    return future, future.result(PATIENCE_S)


def settle(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop do all it has to do now."""
    for _ in range(3):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)


def test_chunks_come_out_while_more_are_made(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    _, stream = start(loop, source)
    for text in ("a", "b", "c"):
        source.send(text)
        assert next(stream) == text
    source.send(None)
    assert list(stream) == []
    assert source.closed.is_set()


def test_chunks_that_arrived_meanwhile_are_joined(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    _, stream = start(loop, source)
    source.send("a", "b", "c")
    settle(loop)
    assert next(stream) == "abc"
    source.send("d", "e", None)
    settle(loop)
    assert list(stream) == ["de"]


def test_nothing_is_yielded_for_empty_chunks(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    _, stream = start(loop, source)
    source.send("", "", None)
    assert list(stream) == []


def test_an_error_comes_after_the_text_before_it(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    _, stream = start(loop, source)
    source.send("a", TritonUnavailable("gone"))
    settle(loop)
    assert next(stream) == "a"
    with pytest.raises(TritonUnavailable, match="gone"):
        next(stream)


def test_closing_cancels(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    _, stream = start(loop, source)
    source.send("a")
    assert next(stream) == "a"
    stream.close()  # type: ignore[attr-defined]
    assert source.closed.wait(PATIENCE_S)


def test_closing_cancels_what_was_never_read(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    future, stream = start(loop, source)
    settle(loop)
    stream.close()  # type: ignore[attr-defined]
    del future, stream
    gc.collect()
    assert source.closed.wait(2)


def test_cancelling_the_future_cancels_the_stream(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    future, stream = start(loop, source)
    source.send("a")
    assert next(stream) == "a"
    assert future.cancel() is True
    assert source.closed.wait(PATIENCE_S)
    with pytest.raises(CancelationException):
        next(stream)


def test_text_before_a_cancellation_is_not_lost(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    future, stream = start(loop, source)
    source.send("a", "b")
    settle(loop)
    future.cancel()
    assert source.closed.wait(PATIENCE_S)
    settle(loop)
    assert next(stream) == "ab"
    with pytest.raises(CancelationException):
        next(stream)


def test_a_reader_that_waits_is_woken_by_a_cancellation(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    future, stream = start(loop, source)
    caught: Future[BaseException] = Future()

    def read() -> None:
        try:
            next(stream)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            caught.set_result(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    future.cancel()
    assert isinstance(caught.result(PATIENCE_S), CancelationException)
    reader.join(PATIENCE_S)


def test_a_cancellation_between_return_and_result(loop: asyncio.AbstractEventLoop) -> None:
    source = Source(loop)
    made = threading.Event()

    async def run() -> Iterator[str]:
        stream = livestream.live(source.chunks())
        asyncio.get_running_loop().call_later(0.02, made.set)
        return stream

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    assert made.wait(PATIENCE_S)
    future.cancel()
    assert isinstance(future.result(PATIENCE_S), GeneratorType)
    assert source.closed.wait(PATIENCE_S)


def test_a_coroutine_that_still_runs_is_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def run() -> None:
        started.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            cancelled.set()

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    assert started.wait(PATIENCE_S)
    future.cancel()
    assert cancelled.wait(PATIENCE_S)


def test_one_stream_of_many_is_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    sources = [Source(loop) for _ in range(8)]
    started = [start(loop, source) for source in sources]
    started[3][0].cancel()
    assert sources[3].closed.wait(PATIENCE_S)
    for place, (source, (_, stream)) in enumerate(zip(sources, started, strict=True)):
        if place != 3:
            source.send(f"{place}", None)
            assert "".join(stream) == f"{place}"


def test_other_futures_are_what_they_were(loop: asyncio.AbstractEventLoop) -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ValueError("no")

    future = asyncio.run_coroutine_threadsafe(answer(), loop)
    assert future.result(PATIENCE_S) == 42
    assert future.done()
    assert not future.cancelled()
    called: list[object] = []
    future.add_done_callback(called.append)
    assert len(called) == 1
    with pytest.raises(ValueError, match="no"):
        asyncio.run_coroutine_threadsafe(fail(), loop).result(PATIENCE_S)


def test_nothing_is_kept_of_streams_that_are_over(loop: asyncio.AbstractEventLoop) -> None:
    before = len(livestream._cancellers)
    for _ in range(5):
        source = Source(loop)
        _, stream = start(loop, source)
        source.send("x", None)
        assert list(stream) == ["x"]
    assert len(livestream._cancellers) == before


def test_installing_twice_wraps_once(loop: asyncio.AbstractEventLoop) -> None:
    once: Callable[..., Any] = asyncio.run_coroutine_threadsafe
    livestream.install()
    assert asyncio.run_coroutine_threadsafe is once
