"""Engine process: events come back from the child, and every request gets its last event."""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_clients import RawClient
from started_engines import StartedEngine
from step_engines import BROKEN, ENGINE, HUGE, REFUSED
from vllm_hosts import Inbox

from cog_triton.engines import engine_messages
from cog_triton.engines.base import EngineStats
from cog_triton.engines.engine_link import EngineLink, coalesce_events, events_of
from cog_triton.engines.engine_messages import Hello, Welcome
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import (
    CANCELLED,
    ERROR,
    FINISH_REASONS,
    GOES_ON,
    LENGTH,
    StepItem,
    encode,
)
from cog_triton.errors import EngineCorrupt, InvalidArgument, TritonUnavailable
from cog_triton.ipc.framing import FrameSocket
from cog_triton.system import local_socket
from cog_triton.text.sampling import SamplingParams

PATIENCE_S = 60
FOREVER = 10**9
HANDLES = itertools.count(1)


@pytest.fixture(autouse=True)
def _importable_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here + os.pathsep + os.environ.get("PYTHONPATH", ""))


@contextmanager
def running(
    tmp_path: Path, max_batch_size: int = 4, **parameters: str
) -> Iterator[tuple[StartedEngine, int]]:
    """An engine and the pid of its process."""
    pid_file = tmp_path / "pid"
    engine = StartedEngine(
        ENGINE, {"max_batch_size": str(max_batch_size), "pid_file": str(pid_file), **parameters}
    )
    try:
        yield engine, int(pid_file.read_text())
    finally:
        closer = threading.Thread(target=engine.close, daemon=True)
        closer.start()
        closer.join(PATIENCE_S)
        assert not closer.is_alive(), "close() hangs"


def submit(engine: StartedEngine, request: EngineRequest, inbox: Inbox) -> int:
    handle = next(HANDLES)
    engine.submit(handle, request, inbox)
    return handle


def request(*ids: int, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(input_ids=list(ids), sampling=SamplingParams(max_tokens=max_tokens))


def exists(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


def until_idle(engine: StartedEngine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while engine.stats().active:
        assert time.monotonic() < deadline, "a request never ends"
        time.sleep(0.005)


def test_every_step_of_every_request_comes_back_in_order(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, _):
        inboxes = {start: Inbox() for start in range(0, 1000, 100)}
        for start, inbox in inboxes.items():
            submit(engine, request(start), inbox)
        for start, inbox in inboxes.items():
            events = inbox.until_end()
            ids = [token for event in events for token in event.token_ids]
            assert ids == [start + n for n in (1, 2, 3)]
            assert {event.finish for event in events[:-1]} <= {None}
            assert events[-1].finish == "length"
        until_idle(engine)


def test_events_that_queue_up_are_coalesced(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, pid):
        entered, behind, others = threading.Event(), threading.Event(), Inbox()
        slow: list[TokenEvent] = []

        def emit(event: TokenEvent) -> None:
            slow.append(event)
            if len(slow) == 1:
                entered.set()
                assert behind.wait(PATIENCE_S)

        engine.submit(next(HANDLES), request(7, max_tokens=200), emit)
        submit(engine, request(1000, max_tokens=3), others)
        assert entered.wait(PATIENCE_S)
        _until_asleep(pid)  # the engine has made all tokens meanwhile
        behind.set()
        until_idle(engine)
        assert [token for event in slow for token in event.token_ids] == list(range(8, 208))
        assert len(slow) < 100
        assert [token for event in others.until_end() for token in event.token_ids] == [
            1001,
            1002,
            1003,
        ]


def test_a_link_that_is_closed_before_it_starts_ends_what_it_was_given() -> None:
    ends = queue.Queue[Any]()
    link, theirs = _linked()
    link.submit(1, request(1), ends.put)
    link.close()
    link.start()
    assert isinstance(ends.get(timeout=PATIENCE_S).error, TritonUnavailable)
    theirs.close()


def test_first_tokens_are_emitted_before_later_ones() -> None:
    order = queue.Queue[str]()
    client, theirs = _linked()
    client.start()
    for handle, name in enumerate(["first", "second", "third"]):
        client.submit(handle, request(1), lambda event, name=name: order.put(name))
    try:
        theirs.send(_step(StepItem(0, 0, 0, [5], []), StepItem(1, 0, 0, [5], [])))
        assert [order.get(timeout=PATIENCE_S) for _ in range(2)] == ["first", "second"]
        theirs.send(_step(*(StepItem(n, 0, 1, [6], [], LENGTH) for n in range(3))))
        found = [order.get(timeout=PATIENCE_S) for _ in range(3)]
    finally:
        theirs.close()
        client.close()
    assert found == ["third", "first", "second"]
    assert not client._started


def _linked() -> tuple[EngineLink, FrameSocket]:
    """A link that has not started, and the engine's end of it."""
    name = f"cog-triton-test-{secrets.token_hex(8)}"
    with local_socket.listen(name) as listener, ThreadPoolExecutor(1) as pool:
        listener.setblocking(True)
        theirs = pool.submit(_welcoming, listener)
        link = EngineLink(name, "tokens", on_end=lambda: None, on_stats=lambda stats: None)
        return link, theirs.result()


def _welcoming(listener: socket.socket) -> FrameSocket:
    frames = FrameSocket(listener.accept()[0])
    assert engine_messages.decode(frames.receive()) == Hello("tokens")
    frames.send(engine_messages.encode(Welcome(4)))
    return frames


def _step(*items: StepItem) -> bytes:
    return engine_messages.encode(encode(items))


steps = st.lists(
    st.builds(
        StepItem,
        st.integers(1, 3),
        st.just(0),
        st.integers(0, 9),
        st.lists(st.integers(0, 9), max_size=3),
        st.just([]),
        st.sampled_from([GOES_ON, LENGTH, CANCELLED, ERROR]),
        st.just("E2105 TritonUnavailable: gone"),
    ),
    max_size=9,
)


@given(steps)
def test_coalesced_events_are_what_the_items_were(items: list[StepItem]) -> None:
    """Tokens and ends of each request, in their order."""

    def said(events: Iterable[tuple[int, TokenEvent]]) -> dict[int, list[Any]]:
        told: dict[int, list[Any]] = {}
        for handle, event in events:
            ends = [end for end in (event.finish, event.error and str(event.error)) if end]
            told.setdefault(handle, []).extend([*event.token_ids, *ends])
        return told

    wanted: dict[int, list[Any]] = {}
    for item in items:
        ends = [str(item.error)] if item.end == ERROR else []
        ends = ends or [FINISH_REASONS[item.end]] if item.end else []
        wanted.setdefault(item.handle, []).extend([*item.ids, *ends])
    assert said(events_of(items)) == wanted
    if not any(item.end for item in items):  # nothing follows an end
        assert said(coalesce_events(list(events_of(items)))) == wanted


def test_tokens_are_emitted_before_the_error_they_came_with() -> None:
    client = coalesce_events(
        [
            (1, TokenEvent([5], [0.5])),
            (2, TokenEvent([9], [])),
            (1, TokenEvent([6], [0.25])),
            (1, TokenEvent([], [], error=InvalidArgument("no"))),
        ]
    )
    (_, first), (_, error), (other, _) = client
    assert (first.token_ids, first.log_probs, first.finish) == ([5, 6], [0.5, 0.25], None)
    assert isinstance(error.error, InvalidArgument)
    assert other == 2


def test_a_message_larger_than_any_socket_buffer_arrives(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, _):
        inbox = Inbox()
        submit(engine, request(HUGE, *range(10**6), max_tokens=1), inbox)
        assert len(inbox.next().token_ids) == 10**6


def test_a_refused_request_ends_with_its_error_and_others_continue(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, _):
        other, refused = Inbox(), Inbox()
        submit(engine, request(1, max_tokens=50), other)
        submit(engine, request(REFUSED), refused)
        (event,) = refused.until_end()
        assert isinstance(event.error, InvalidArgument)
        assert "bad luck" in str(event.error)
        assert sum(len(event.token_ids) for event in other.until_end()) == 50
        until_idle(engine)
        submit(engine, request(REFUSED), refused)
        assert isinstance(refused.next().error, InvalidArgument)
        until_idle(engine)


def test_cancel_ends_one_request_and_then_is_no_error(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, _):
        for others in (0, 1):  # alone, no other message follows that could wake the child
            endless, short = Inbox(), Inbox()
            handle = submit(engine, request(1, max_tokens=FOREVER), endless)
            endless.next()
            for _ in range(others):
                submit(engine, request(2, max_tokens=100), short)
            engine.cancel(handle)
            assert endless.until_end()[-1].finish == "cancelled"
        assert short.until_end()[-1].finish == "length"
        until_idle(engine)
        engine.cancel(handle)
        engine.cancel(12345)
        submit(engine, request(5), short)
        assert short.until_end()[-1].finish == "length"


def test_stats_count_active_and_waiting_requests(tmp_path: Path) -> None:
    with running(tmp_path, max_batch_size=2) as (engine, _):
        assert engine.stats() == EngineStats(0, 0, 2)
        inboxes = [Inbox() for _ in range(5)]
        handles = [submit(engine, request(1, max_tokens=FOREVER), inbox) for inbox in inboxes]
        assert engine.stats() == EngineStats(5, 3, 2)
        for handle in handles:
            engine.cancel(handle)
        until_idle(engine)
        assert engine.stats() == EngineStats(0, 0, 2)


def test_stats_have_the_kv_cache_once_the_engine_tells(tmp_path: Path) -> None:
    with running(tmp_path, kv_cache="yes") as (engine, _):
        told = queue.Queue[None]()
        engine.on_kv_cache = lambda: told.put(None)
        handle = submit(engine, request(1, max_tokens=FOREVER), Inbox())
        for wanted in (KVCacheStats(0.001), KVCacheStats(0)):
            while engine.stats().kv_cache != wanted:
                told.get(timeout=PATIENCE_S)
            engine.cancel(handle)


def test_stats_count_requests_of_front_ends_until_the_engine_dies(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, pid), closing(RawClient(engine.socket)) as steps:
        told = threading.Event()
        engine.on_kv_cache = told.set
        for handle in (1, 2):
            steps.submit(handle, request(1, max_tokens=FOREVER))
        while engine.stats().step_requests < 2:
            steps.receive()
        assert engine.stats().active == 0, "they are not its own"
        told.clear()
        os.kill(pid, signal.SIGKILL)
        assert told.wait(PATIENCE_S)
        assert engine.stats().step_requests == 0


def test_close_ends_the_child_and_running_requests(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, pid):
        inbox = Inbox()
        submit(engine, request(1, max_tokens=FOREVER), inbox)
        inbox.next()
        assert exists(pid)
        engine.close()
        assert not exists(pid)
        engine.close()
        assert isinstance(inbox.until_end()[-1].error, TritonUnavailable)


def test_sigkill_of_the_child_ends_every_request_with_e2105(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, pid):
        inboxes = [Inbox() for _ in range(8)]
        for inbox in inboxes:
            submit(engine, request(1, max_tokens=FOREVER), inbox)
        inboxes[0].next()
        os.kill(pid, signal.SIGKILL)
        for inbox in inboxes:
            assert isinstance(inbox.until_end()[-1].error, TritonUnavailable)
            assert inbox.is_empty()
        assert engine.stats().active == 0


def test_requests_to_a_dead_child_end_with_e2105_on_another_thread(tmp_path: Path) -> None:
    """`TokenEngine.submit` promises so; Triton's model holds a lock that its `emit` takes."""
    with running(tmp_path) as (engine, pid):
        os.kill(pid, signal.SIGKILL)
        ends: queue.Queue[Any] = queue.Queue()
        for _ in range(3):
            handle = next(HANDLES)
            engine.submit(handle, request(1), lambda end: ends.put((end, threading.get_ident())))
            event, thread = ends.get(timeout=PATIENCE_S)
            assert isinstance(event.error, TritonUnavailable)
            assert thread != threading.get_ident()
            engine.cancel(handle)
        assert engine.stats().active == 0


def test_death_in_the_middle_of_a_message_ends_every_request(tmp_path: Path) -> None:
    gate, entered, inbox = threading.Event(), threading.Event(), Inbox()

    def hold(event: TokenEvent) -> None:
        entered.set()
        gate.wait()

    with running(tmp_path) as (engine, pid):
        try:
            engine.submit(next(HANDLES), request(1, max_tokens=1), hold)
            assert entered.wait(PATIENCE_S)
            submit(engine, request(HUGE, max_tokens=FOREVER), inbox)
            _until_asleep(pid)  # the reader waits, so its pipe is full
            os.kill(pid, signal.SIGKILL)
        finally:
            gate.set()
        assert isinstance(inbox.until_end()[-1].error, TritonUnavailable)


def _until_asleep(pid: int) -> None:
    """Until all threads of the process sleep, and have spent no time between two looks."""
    deadline = time.monotonic() + PATIENCE_S
    before: list[tuple[bytes, ...]] = []
    while before != (before := _threads(pid)) or any(thread[0] != b"S" for thread in before):
        assert time.monotonic() < deadline
        time.sleep(0.3)


def _threads(pid: int) -> list[tuple[bytes, ...]]:
    """State and CPU time of each thread."""
    stats = [
        task.read_bytes().rpartition(b")")[2] for task in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return [(fields[0], *fields[11:13]) for fields in map(bytes.split, stats)]


def test_an_engine_that_raises_ends_every_request_and_its_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as (engine, _):
        bystander, culprit = Inbox(), Inbox()
        submit(engine, request(1, max_tokens=FOREVER), bystander)
        submit(engine, request(BROKEN), culprit)
        for inbox in (bystander, culprit):
            assert isinstance(inbox.until_end()[-1].error, TritonUnavailable)
    assert "ZeroDivisionError: the engine broke" in capfd.readouterr().err


def test_an_engine_that_does_not_load_raises_its_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises((RuntimeError, EngineCorrupt), match=r"E1306 EngineCorrupt: x\.bin"):
        StartedEngine(ENGINE, {"corrupt": "x.bin", "pid_file": str(pid_file)})
    assert not exists(int(pid_file.read_text()))
