"""Concurrent streaming through coglet: live chunks, contexts, cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from queue import SimpleQueue
from types import GeneratorType
from typing import Any

import pytest
from cog import CancelationException
from scripted_server import HANG, PATIENCE_S, Part
from scripted_triton import Request
from test_generate import generating, started, tokens

from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.serving.coglet import concurrent_streaming

PREDICTION: ContextVar[str] = ContextVar("PREDICTION", default="none")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", asyncio.run_coroutine_threadsafe)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    concurrent_streaming.install(start)
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Source:
    """Chunks that come when the test says so; a cancellation makes them raise."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[str | BaseException | None] = SimpleQueue()
        self.started = threading.Event()
        self.closed = threading.Event()
        self.cancelled = threading.Event()

    def send(self, *items: str | BaseException | None) -> None:
        for item in items:
            self._queue.put(item)

    def cancel(self) -> None:
        self.cancelled.set()
        self.send(TritonUnavailable("hung up"))

    def chunks(self) -> Generator[str, None, None]:
        self.started.set()
        try:
            while (item := self._queue.get(timeout=PATIENCE_S)) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed.set()


async def _ctx_wrapper(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """By this name coglet calls what it wraps the coroutine of a prediction in."""
    return await coroutine


def start(
    loop: asyncio.AbstractEventLoop,
    chunks: Generator[str, None, None],
    cancel: Callable[[], None] = lambda: None,
    prediction: str = "one",
) -> tuple[Any, Iterator[str]]:
    """What coglet does: the future of a coroutine that returns the live stream."""

    async def run() -> Iterator[str]:
        PREDICTION.set(prediction)
        return concurrent_streaming.cancellable_stream(chunks, cancel)

    future = asyncio.run_coroutine_threadsafe(_ctx_wrapper(run()), loop)
    return future, future.result()


def test_chunks_are_streamed_as_they_are_made(loop: asyncio.AbstractEventLoop) -> None:
    source = Source()
    _, stream = start(loop, source.chunks())
    for text in ("a", "b", "c"):
        source.send(text)
        assert next(stream) == text
    assert not source.closed.is_set()
    source.send(None)
    assert list(stream) == []
    assert source.closed.is_set()


def test_error_comes_unchanged_after_earlier_chunks(loop: asyncio.AbstractEventLoop) -> None:
    source, error = Source(), InvalidArgument("top_k=-1")
    _, stream = start(loop, source.chunks(), source.cancel)
    source.send("a", error)
    assert next(stream) == "a"
    with pytest.raises(InvalidArgument) as caught:
        next(stream)
    assert caught.value is error
    assert not source.cancelled.is_set()


def test_dropping_the_stream_closes_the_chunks(loop: asyncio.AbstractEventLoop) -> None:
    source = Source()
    future, stream = start(loop, source.chunks())
    source.send("a")
    assert next(stream) == "a"
    del future, stream
    assert source.closed.wait(PATIENCE_S)


def test_unread_stream_never_starts(loop: asyncio.AbstractEventLoop) -> None:
    source = Source()
    _, stream = start(loop, source.chunks())
    stream.close()  # type: ignore[attr-defined]
    assert list(stream) == []
    assert not source.started.is_set()


def test_chunks_run_in_the_context_of_their_prediction(loop: asyncio.AbstractEventLoop) -> None:
    """Cog finds by it whose log a print() and whose metrics a record_metric() are."""

    def chunks() -> Generator[str, None, None]:
        yield PREDICTION.get()
        yield PREDICTION.get()
        PREDICTION.set("changed")
        yield PREDICTION.get()

    streams = [start(loop, chunks(), prediction=name)[1] for name in ("one", "two")]
    seen = [[next(stream) for stream in streams] for _ in range(3)]
    assert seen == [["one", "two"], ["one", "two"], ["changed", "changed"]]
    with ThreadPoolExecutor() as pool:
        _, stream = start(loop, chunks(), prediction="three")
        assert pool.submit(list, stream).result(PATIENCE_S) == ["three", "three", "changed"]
    assert PREDICTION.get() == "none", "the reader's own"


def watched_end(seen: list[str], error: Exception | None = None) -> Generator[str, None, None]:
    try:
        yield "a"
        if error:
            raise error
        yield "b"
    finally:
        seen.append(PREDICTION.get())


@pytest.mark.parametrize("error", [None, ValueError("no")], ids=["closed", "failing"])
def test_chunks_end_in_their_context(
    error: Exception | None, loop: asyncio.AbstractEventLoop
) -> None:
    seen: list[str] = []
    _, stream = start(loop, watched_end(seen, error))
    assert next(stream) == "a"
    if error:
        with pytest.raises(ValueError, match="no"):
            next(stream)
    else:
        stream.close()  # type: ignore[attr-defined]
    assert seen == ["one"]


def test_cancelling_the_future_cancels_the_stream(loop: asyncio.AbstractEventLoop) -> None:
    source = Source()
    future, stream = start(loop, source.chunks(), source.cancel)
    source.send("a", "b")
    assert next(stream) == "a"
    assert future.cancel() is True
    assert source.cancelled.is_set()
    assert next(stream) == "b", "what came before it is kept"
    with pytest.raises(CancelationException):
        next(stream)
    assert source.closed.is_set()


def test_cancellation_wakes_a_waiting_reader(loop: asyncio.AbstractEventLoop) -> None:
    source = Source()
    future, stream = start(loop, source.chunks(), source.cancel)
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(next, stream)
        assert source.started.wait(PATIENCE_S)
        assert not reader.done()
        future.cancel()
        assert isinstance(reader.exception(PATIENCE_S), CancelationException)
    assert source.closed.is_set()


def test_cancellation_before_the_stream_exists_cancels_it(loop: asyncio.AbstractEventLoop) -> None:
    source = Source()

    async def run() -> Iterator[str]:
        return concurrent_streaming.cancellable_stream(source.chunks(), source.cancel)

    future = asyncio.run_coroutine_threadsafe(_ctx_wrapper(run()), loop)
    future.cancel()
    stream = future.result()
    assert isinstance(stream, GeneratorType)
    assert source.cancelled.is_set()
    with pytest.raises(CancelationException):
        next(stream)


def test_prediction_runs_on_the_calling_thread(loop: asyncio.AbstractEventLoop) -> None:
    """The event loop takes no part: on the way to it and back a request would wait for others."""
    threads: list[int] = []

    async def run() -> Iterator[str]:
        threads.append(threading.get_ident())
        return concurrent_streaming.cancellable_stream((text for text in ("a",)), lambda: None)

    busy = threading.Event()
    loop.call_soon_threadsafe(busy.wait, PATIENCE_S)
    future = asyncio.run_coroutine_threadsafe(_ctx_wrapper(run()), loop)
    assert list(future.result()) == ["a"]
    assert threads == [threading.get_ident()]
    busy.set()


def test_exception_of_a_prediction_is_raised(loop: asyncio.AbstractEventLoop) -> None:
    async def run() -> Iterator[str]:
        raise InvalidArgument("top_k=-1")

    with pytest.raises(InvalidArgument, match="top_k=-1"):
        asyncio.run_coroutine_threadsafe(_ctx_wrapper(run()), loop).result()


def test_prediction_that_awaits_is_rejected(loop: asyncio.AbstractEventLoop) -> None:
    async def run() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="must not wait"):
        asyncio.run_coroutine_threadsafe(_ctx_wrapper(run()), loop).result()


def test_running_coroutine_is_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def run() -> None:
        started.set()
        try:
            await asyncio.sleep(2 * PATIENCE_S)
        finally:
            cancelled.set()

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    assert started.wait(PATIENCE_S)
    assert future.cancel() is True
    assert cancelled.wait(PATIENCE_S)


def test_cancelling_one_stream_leaves_the_others(loop: asyncio.AbstractEventLoop) -> None:
    sources = [Source() for _ in range(8)]
    started = [start(loop, source.chunks(), source.cancel) for source in sources]
    started[3][0].cancel()
    for place, (source, (_, stream)) in enumerate(zip(sources, started, strict=True)):
        assert source.cancelled.is_set() is (place == 3)
        if place != 3:
            source.send(f"{place}", None)
            assert "".join(stream) == f"{place}"


def test_other_coroutines_get_the_original_future(loop: asyncio.AbstractEventLoop) -> None:
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


def test_finished_streams_are_not_kept_in_memory(loop: asyncio.AbstractEventLoop) -> None:
    before = len(concurrent_streaming._cancellers)
    for _ in range(5):
        source = Source()
        _, stream = start(loop, source.chunks(), source.cancel)
        source.send("x", None)
        assert list(stream) == ["x"]
        unread = concurrent_streaming.cancellable_stream(source.chunks(), source.cancel)
        del unread
    assert len(concurrent_streaming._cancellers) == before


def test_installing_twice_patches_once(loop: asyncio.AbstractEventLoop) -> None:
    once: Callable[..., Any] = asyncio.run_coroutine_threadsafe
    concurrent_streaming.install(start)
    assert asyncio.run_coroutine_threadsafe is once


@pytest.mark.parametrize("made", [[], ["a"]], ids=["before the first token", "after a token"])
def test_a_cancelled_prediction_stops_the_engine(
    made: list[str], loop: asyncio.AbstractEventLoop
) -> None:
    """All of it: future, live stream, text, sockets."""

    def answer(request: Request) -> list[Part]:
        return [*tokens(*made), HANG] if made else [HANG]

    with ThreadPoolExecutor() as pool, generating(answer) as (generator, server):
        texts = started(generator)
        future, live = start(loop, texts, texts.generation.ticket.cancel)  # type: ignore[arg-type]
        assert [next(live) for _ in made] == made
        reader = pool.submit(next, live)
        request = server.request()
        assert not reader.done()
        assert future.cancel() is True
        assert isinstance(reader.exception(PATIENCE_S), CancelationException)
        assert request.left.wait(PATIENCE_S)
