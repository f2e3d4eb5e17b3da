"""Engine process: events come back from the child, and every request gets its last event."""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_clients import FrameSocket
from started_engines import StartedEngine
from step_engines import ENGINE
from vllm_hosts import Inbox, token_ids

from cog_triton.engines import engine_messages
from cog_triton.engines.engine_client import EngineClient, coalesce_events, events_of
from cog_triton.engines.engine_messages import Hello, Welcome
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import ERROR, FINISH_REASONS, GOES_ON, LENGTH, StepItem, encode
from cog_triton.errors import TritonUnavailable
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
    tmp_path: Path, max_batch_size: int = 4, **parameters: Any
) -> Iterator[tuple[StartedEngine, int]]:
    """An engine and the pid of its process."""
    pid_file = tmp_path / "pid"
    own = {"max_batch_size": str(max_batch_size), "pid_file": str(pid_file)}
    engine = StartedEngine(ENGINE, own | parameters)
    try:
        yield engine, int(pid_file.read_text())
    finally:
        closer = threading.Thread(target=engine.close, daemon=True)
        closer.start()
        closer.join(PATIENCE_S)
        assert not closer.is_alive(), "close() hangs"


def submit(engine: StartedEngine, inbox: Inbox, *ids: int, count: int = FOREVER) -> int:
    handle = next(HANDLES)
    engine.submit(handle, request(*ids, count=count), inbox)
    return handle


def request(*ids: int, count: int = FOREVER) -> EngineRequest:
    return EngineRequest(input_ids=list(ids), sampling=SamplingParams(max_tokens=count))


def test_events_that_queue_up_are_coalesced() -> None:
    all_sent, slow, others = threading.Event(), list[TokenEvent](), Inbox()

    def emit(event: TokenEvent) -> None:
        slow.append(event)
        assert all_sent.wait(PATIENCE_S)

    with _linked() as (client, theirs):
        client.submit(1, request(1), emit)
        client.submit(2, request(1), others)
        for n in range(50):
            theirs.send(_step(StepItem(1, 0, n, [n], [])))
        theirs.send(_step(StepItem(2, 0, 0, [5], [], LENGTH)))
        all_sent.set()
        assert token_ids(others.until_end()) == [5]
    assert token_ids(slow[:-1]) == [*range(50)]
    assert len(slow) < 25
    assert isinstance(slow[-1].error, TritonUnavailable)


def test_first_tokens_are_emitted_before_later_ones() -> None:
    order = queue.Queue[str]()
    with _linked() as (client, theirs):
        for handle, name in enumerate(["first", "second", "third"]):
            client.submit(handle, request(1), lambda event, name=name: order.put(name))
        theirs.send(_step(StepItem(0, 0, 0, [5], []), StepItem(1, 0, 0, [5], [])))
        assert [order.get(timeout=PATIENCE_S) for _ in range(2)] == ["first", "second"]
        theirs.send(_step(*(StepItem(n, 0, 1, [6], [], LENGTH) for n in range(3))))
        found = [order.get(timeout=PATIENCE_S) for _ in range(3)]
        client.on_kv_cache = lambda: order.put("reported")
    assert found == ["third", "first", "second"]
    assert order.empty()  # Triton that waits for the end takes no metrics
    assert not client._links[0]._started


@contextmanager
def _linked() -> Iterator[tuple[EngineClient, FrameSocket]]:
    """A client, and the engine's end of its connection."""
    name = f"cog-triton-test-{secrets.token_hex(8)}"
    client = EngineClient([name], "tokens")
    with local_socket.listen(name) as listener:
        listener.setblocking(True)
        client.start()
        theirs = FrameSocket(listener.accept()[0])
    assert engine_messages.decode(theirs.receive()) == Hello("tokens")
    theirs.send(engine_messages.encode(Welcome(4)))
    client.wait_until_linked()
    yield client, theirs
    client.close()
    theirs.close()


def _step(*items: StepItem) -> bytes:
    return engine_messages.encode(encode(items))


steps = st.lists(
    st.builds(
        lambda handle, ids, end, text: StepItem(
            handle, 0, 0, ids, [token / 2 for token in ids], end, text
        ),
        st.integers(1, 3),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from([GOES_ON, *FINISH_REASONS, ERROR]),
        st.just("E2105 TritonUnavailable: gone"),
    ),
    max_size=9,
)


@given(steps)
def test_coalesced_events_are_what_the_items_were(items: list[StepItem]) -> None:
    """Tokens and ends of each request, in their order."""

    def said(events: Iterable[tuple[int, TokenEvent]]) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for handle, event in events:
            ends = [end for end in (event.finish, event.error and str(event.error)) if end]
            assert event.error is None or not event.token_ids
            of_tokens = zip(event.token_ids, event.log_probs, strict=True)
            found.setdefault(handle, []).extend([*of_tokens, *ends])
        return found

    wanted: dict[int, list[Any]] = {}
    sent = []
    for item in items:
        of_handle = wanted.setdefault(item.handle, [])
        if not (of_handle and isinstance(of_handle[-1], str)):  # nothing follows an end
            ends = [FINISH_REASONS.get(item.end, str(item.error))] if item.end else []
            of_handle.extend([*zip(item.ids, item.log_probs, strict=True), *ends])
            sent.append(item)
    assert said(events_of(sent)) == wanted
    assert said(coalesce_events(list(events_of(sent)))) == wanted


def test_sigkill_ends_every_request_with_e2105_on_another_thread(tmp_path: Path) -> None:
    """`EngineClient.submit` promises so; Triton's model holds a lock that its `emit` takes."""
    ends = queue.Queue[tuple[Any, int]]()

    def emit(event: TokenEvent) -> None:
        if event.error is not None:
            ends.put((event.error, threading.get_ident()))

    with running(tmp_path) as (engine, pid):
        inbox = Inbox()
        submit(engine, inbox, 1)
        for _ in range(8):
            engine.submit(next(HANDLES), request(1), emit)
        inbox.next()
        os.kill(pid, signal.SIGKILL)
        for number in range(16):  # half of them come to the dead one
            error, thread = ends.get(timeout=PATIENCE_S)
            assert isinstance(error, TritonUnavailable)
            assert thread != threading.get_ident()
            if number < 8:
                engine.submit(next(HANDLES), request(1), emit)
        inbox.until_end()
        assert engine.stats().active == 0
        assert ends.empty()
