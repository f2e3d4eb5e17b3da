"""Cog's worker: it forwards predictions to the server, streams, cancels, and leaves nothing."""

from __future__ import annotations

import _thread
import asyncio
import builtins
import gc
import itertools
import secrets
import socket
import threading
from collections.abc import Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import pytest
from cog import CancelationException
from raw_clients import FrameSocket
from scripted_server import PATIENCE_S, wait_until

from cog_triton.errors import InvalidArgument, Overloaded, TritonStartFailed, TritonUnavailable
from cog_triton.ipc.framing import frame
from cog_triton.ipc.messages import decode
from cog_triton.serving import cog_messages
from cog_triton.serving.cog_messages import CANCELLED, END, ERROR, LOG, METRICS, OUTPUT, Predict
from cog_triton.serving.coglet import cog_server, predictor, streaming
from cog_triton.serving.coglet.predictor import MockPredictor, Predictor
from cog_triton.system import local_socket, reaper

PREDICTION: ContextVar[str] = ContextVar("_coglet_prediction_id", default="")


def send(own: FrameSocket, *frames: bytes) -> None:
    own.socket.sendall(b"".join(map(frame, frames)))


async def _ctx_wrapper(coroutine: Coroutine[Any, Any, Any], prediction_id: str) -> Any:
    """By this name coglet calls what it wraps the coroutine of a prediction in."""
    PREDICTION.set(prediction_id)
    return await coroutine


class Coglet:
    """Submits predictions as coglet does, and takes the server's orders."""

    def __init__(self, place: Path) -> None:
        self.place = place / "predictions"
        self.address = f"test-cog-streaming-{secrets.token_hex(8)}"
        self.open = ExitStack()
        self.thread = self.open.enter_context(ThreadPoolExecutor()).submit
        self.metrics: dict[str, Any] = {}
        self.worker = self.of(Predictor)
        self.listen()

    def of(self, kind: type[Predictor]) -> Any:
        scope = SimpleNamespace(record_metric=self.metrics.__setitem__)
        worker: Any = type(kind.__name__, (kind,), {"scope": scope})()
        worker._address = self.address
        return worker

    def listen(self) -> None:
        self.listener = self.open.enter_context(local_socket.listen(self.address))
        self.listener.settimeout(PATIENCE_S)

    def accept(self) -> socket.socket:
        accepted = self.open.enter_context(self.listener.accept()[0])
        accepted.settimeout(PATIENCE_S)
        return accepted

    def order(self) -> tuple[Any, FrameSocket]:
        """The next order to the server, and its connection."""
        own = FrameSocket(self.accept())
        return decode(own.receive()), own

    def submit(self, coroutine: Coroutine[Any, Any, Any], name: str = "one") -> Any:
        for part in ("inputs", "outputs"):
            (self.place / name / part).mkdir(parents=True)
        wrapped: Any = _ctx_wrapper(coroutine, name)
        return asyncio.run_coroutine_threadsafe(wrapped, None)  # type: ignore[arg-type]

    def begin(self, name: str = "one", **inputs: Any) -> tuple[Any, Iterator[str]]:
        future = self.submit(self.worker.run(**inputs), name)
        return future, future.result()


@pytest.fixture
def coglet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Coglet]:
    monkeypatch.setattr(cog_server, "PLACE", tmp_path)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", asyncio.run_coroutine_threadsafe)
    monkeypatch.setattr(threading, "get_ident", threading.get_ident)
    monkeypatch.setitem(vars(builtins.__spec__), "_initializing", False)
    streaming.install(lambda: None)
    made = Coglet(tmp_path)
    with made.open:
        yield made


def test_a_stream_is_of_what_the_server_sends(
    coglet: Coglet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that has come together is one piece; log and metrics are in their place."""
    _, stream = coglet.begin("mine", prompt="Hi", top_k=2)
    first = coglet.thread(next, stream)
    order, own = coglet.order()
    assert order == Predict("mine", {"prompt": "Hi", "top_k": 2})
    send(own, LOG + b"begins", OUTPUT + "grö".encode(), OUTPUT + b"\xed\xa0\x80")
    assert first.result(PATIENCE_S) == "grö\ud800"
    assert capsys.readouterr().out == "begins\n"
    send(own, OUTPUT + b"b", METRICS + b'{"count": 3}', OUTPUT + b"c", LOG + b"ends", END)
    assert (next(stream), coglet.metrics) == ("b", {})
    assert list(stream) == ["c"]
    assert (capsys.readouterr().out, coglet.metrics) == ("ends\n", {"count": 3})


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (ERROR + b"E2107 Overloaded: the queue is full", Overloaded, "the queue is full"),
        (ERROR + b"nothing known", RuntimeError, "nothing known"),
        (CANCELLED, CancelationException, "^$"),
        (b"", TritonUnavailable, "the server has ended; try again"),
    ],
)
def test_an_end_that_is_none_is_raised_after_the_text(
    coglet: Coglet,
    answer: bytes,
    error: type[BaseException],
    words: str,
) -> None:
    _, stream = coglet.begin()
    first = coglet.thread(next, stream)
    _, own = coglet.order()
    send(own, OUTPUT + b"a", *([answer] if answer else []))
    own.close()
    assert first.result(PATIENCE_S) == "a"
    with pytest.raises(error, match=words):
        next(stream)


def test_each_stream_runs_in_the_context_of_its_prediction(coglet: Coglet) -> None:
    """Cog finds by it whose log a print() and whose metrics a record_metric() are."""

    def forward(order: str, _: object) -> Generator[str, None, None]:
        try:
            yield order + PREDICTION.get()
            yield order + PREDICTION.get()
        finally:
            ended.append(PREDICTION.get())

    async def run() -> Iterator[str]:
        return streaming.cancellable(forward, "of ")

    ended: list[str] = []
    streams = [coglet.submit(run(), name).result() for name in ("one", "two")]
    assert [next(stream) for stream in streams * 2] == ["of one", "of two"] * 2
    streams[1].close()
    assert list(streams[0]) == []
    assert (ended, PREDICTION.get()) == (["two", "one"], "")


def test_cancelling_the_future_hangs_up_on_the_server(coglet: Coglet) -> None:
    future, stream = coglet.begin("one")
    _, other = coglet.begin("other")
    waiting = coglet.thread(next, stream)
    _, own = coglet.order()
    waiting_too = coglet.thread(list, other)
    _, others = coglet.order()
    assert future.cancel() is True
    assert isinstance(waiting.exception(PATIENCE_S), CancelationException)
    with pytest.raises(EOFError):
        own.receive()
    assert not others.poll()
    send(others, OUTPUT + b"b", END)
    assert waiting_too.result(PATIENCE_S) == ["b"]


def test_one_that_has_not_begun_is_cancelled_when_it_does(coglet: Coglet) -> None:
    for has_stream in (True, False):
        future = coglet.submit(coglet.worker.run(), f"has_stream={has_stream}")
        stream = future.result() if has_stream else None
        assert future.cancel() is True
        with pytest.raises(CancelationException):
            next(stream or future.result())
        assert coglet.accept().recv(1) == b"", "it asks the server for nothing"
    coglet.listener.close()
    with pytest.raises(TritonUnavailable, match="Connection refused; try again"):
        next(coglet.begin("late")[1])
    with pytest.raises(RuntimeError, match="must not wait"):
        coglet.submit(asyncio.sleep(0), "waits").result()


@pytest.mark.parametrize("end", ["read", "dropped", "never begun", "failed"])
def test_directories_of_a_prediction_are_removed(coglet: Coglet, end: str) -> None:
    async def run() -> Iterator[str]:
        if end == "failed":
            raise InvalidArgument("top_k=-1")
        return streaming.cancellable(lambda order, _: (each for each in order), "ab")

    (coglet.place / "bystander").mkdir(parents=True)
    future: Any = coglet.submit(run(), end)
    assert (coglet.place / end / "outputs").is_dir()
    if end == "failed":
        with pytest.raises(InvalidArgument, match="top_k=-1"):
            future.result()
    else:
        stream = future.result()
        count = {"read": None, "dropped": 1, "never begun": 0}[end]
        assert list(itertools.islice(stream, count)) == ["a", "b"][:count]
        assert (coglet.place / end / "outputs").is_dir()
        stream = future = None
        gc.collect()
        assert not streaming._hangups, "nothing stays in memory"
    assert [path.name for path in coglet.place.iterdir()] == ["bystander"]


def test_coglet_finds_no_thread_to_raise_in_and_others_are_as_ever(coglet: Coglet) -> None:
    """It asks on a thread without a Python frame; Python code gets its own identifier."""

    async def run() -> str:
        loop = asyncio.get_running_loop()
        done = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "done"), loop)
        return await asyncio.wrap_future(done)

    assert asyncio.run(run()) == "done"
    assert threading.get_ident() == _thread.get_ident()
    found: list[int] = []
    calls = itertools.starmap(threading.get_ident, [()])  # neither has a Python frame
    _thread.start_new_thread(found.extend, (calls,))
    wait_until(lambda: bool(found))
    assert found == [0]


@pytest.mark.parametrize("lives", [True, False])
def test_without_a_server_the_worker_starts_one_and_ends_with_it(
    lives: bool, coglet: Coglet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(command: list[str], *, env: dict[str, str], **_: object) -> object:
        assert command[-2:] == ["serve", "--behind-cog"]
        assert (env["COG_TRITON_ENGINE"], env["COG_WEIGHTS"]) == ("mock", "engine.tar")
        coglet.address = env[cog_messages.ADDRESS_VARIABLE]
        if lives:
            coglet.listen()
        listens.set()
        return SimpleNamespace(poll=lambda: None if lives else 1, wait=lambda: None)

    listens, stopped = threading.Event(), threading.Event()
    monkeypatch.setattr(reaper, "spawn", spawn)
    monkeypatch.setattr(predictor, "stop_parent", stopped.set)
    worker = coglet.of(MockPredictor)
    worker._address = ""
    set_up = coglet.thread(worker._set_up, "engine.tar")
    assert listens.wait(PATIENCE_S)
    if lives:
        send(coglet.order()[1], END)
        assert stopped.wait(PATIENCE_S)
    assert isinstance(set_up.exception(PATIENCE_S), NoneType if lives else TritonStartFailed)
