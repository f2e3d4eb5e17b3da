"""Engine loop and its clients: several peers of one engine process, and events in order."""

from __future__ import annotations

import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_clients import PATIENCE_S, Control, FrameSocket, RawClient
from step_engines import REFUSED, CountingEngine

from cog_triton.engines import engine_messages, engine_spec
from cog_triton.engines.engine_client import EngineClient, coalesce_events, events_of
from cog_triton.engines.engine_loop import run_engine
from cog_triton.engines.engine_messages import Cancel, Hello, Others, StepLoad, Welcome
from cog_triton.engines.engine_orders import Opened, Serve, Stop
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import ERROR, FINISH_REASONS, GOES_ON, LENGTH, StepItem, encode
from cog_triton.errors import TritonUnavailable
from cog_triton.ipc import framing
from cog_triton.system import local_socket
from cog_triton.system.shared_time import SharedTime
from cog_triton.text.sampling import SamplingParams

FOREVER = 10**9


class Engine(CountingEngine):
    waits_for_readers = False

    def __init__(self) -> None:
        super().__init__(64)
        self.steps = 0
        self.hangs = False

    @property
    def live(self) -> int:
        return len(self._live)

    def wait_s(self) -> float | None:
        return None if self.hangs else super().wait_s()

    def step(self) -> list[tuple[int, TokenEvent]]:
        self.steps += 1
        return [] if self.hangs else super().step()


class World:
    def __init__(self) -> None:
        self.engine = Engine()
        self.progress = SharedTime()
        self.socket = f"cog-triton-test-{secrets.token_hex(8)}"
        ours, self._theirs = socket.socketpair()
        self.control = Control(ours)
        self.ended: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.control.answer() == Opened()
        self.control.order(Serve(self.socket, 3))
        until(self._listens)
        self.guests: list[RawClient] = []
        self.owner = self.greeted("owner")

    def guest(self, role: Any = "steps") -> RawClient:
        client = RawClient(self.socket, role)
        self.guests.append(client)
        return client

    def greeted(self, role: str = "steps") -> RawClient:
        client = self.guest(role)
        assert client.receive() == Welcome(64, generation=3)
        return client

    def close(self) -> None:
        if self._thread.is_alive():
            self.control.order(Stop())
            self.until_over()
            until_hung_up(self.owner.receive)
            assert self.ended == [None]
        for connection in [*self.guests, self.control]:
            connection.close()

    def _listens(self) -> bool:
        with suppress(ConnectionRefusedError):
            local_socket.connect(self.socket).close()  # a guest that says nothing
            return True
        return False

    def until_over(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            run_engine(self.engine, self._theirs, self.progress)
            self.ended.append(None)
        except (EOFError, OSError) as error:
            self.ended.append(error)


def until_hung_up(receive: Callable[[], object]) -> None:
    with suppress(EOFError, ConnectionError):
        while True:
            receive()


def until_end(client: RawClient) -> list[StepItem]:
    """Items of one request."""
    items = client.items()
    while not items[-1].end:
        items += client.items()
    return items


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def request(first: int, count: int, **values: Any) -> EngineRequest:
    return EngineRequest(input_ids=[first], sampling=SamplingParams(max_tokens=count), **values)


def submit(client: RawClient, handle: int, first: int, count: int, **values: Any) -> None:
    client.submit(handle, request(first, count, **values))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


BREACHES = {
    "a handle twice": engine_messages.submit(1, request(1, 1)),
    "another hello": engine_messages.encode(Hello("tokens")),
    "no message": b"no message",
}
HELLOS = {
    "of no role": engine_messages.encode(Hello("other")),  # type: ignore[arg-type]
    "no hello": engine_messages.encode(Cancel(1)),
    "no message at first": b"no message",
}


@pytest.mark.parametrize("breach", BREACHES | HELLOS)
def test_a_peer_that_breaks_the_protocol_is_hung_up_on_alone(world: World, breach: str) -> None:
    first, last = (engine_messages.submit(handle, request(1, FOREVER)) for handle in (1, 2))
    if breach in HELLOS:
        payloads, odd = [HELLOS[breach], first], FrameSocket(local_socket.connect(world.socket))
    else:
        payloads, odd = [first, BREACHES[breach], last], world.greeted("tokens").frames
    odd.socket.sendall(b"".join(map(framing.frame, payloads)))
    until_hung_up(odd.receive)
    odd.close()
    until(lambda: not world.engine.live)
    submit(world.owner, 1, 300, 1)
    assert world.owner.items()[0].ids == [301]


def test_another_user_is_hung_up_on_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX) as other:
        patch.setattr(local_socket, "is_same_user", lambda _: False)
        other.connect(local_socket.address(world.socket))
        assert other.recv(1) == b""
    submit(world.owner, 1, 300, 1)
    assert world.owner.items()[0].ids == [301]


def test_each_peer_gets_its_own_handles_and_one_of_steps_a_stream(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming: list[bool] = []
    take = world.engine.submit

    def note(number: int, request: EngineRequest) -> None:
        streaming.append(request.streaming)
        take(number, request)

    monkeypatch.setattr(world.engine, "submit", note)
    for role in ("owner", "steps", "tokens"):
        submit(world.greeted(role), 1, 100, 3, streaming=False)
    for client in world.guests[1:]:
        wanted = [StepItem(1, 0, n, [101 + n], [], 2 * (n == 2)) for n in range(3)]
        assert until_end(client) == wanted
    assert sorted(streaming) == [False, False, True]


def test_a_guest_that_reads_nothing_holds_up_nobody_and_loses_nothing(world: World) -> None:
    for role in ("steps", "tokens"):
        slow = world.greeted(role)
        submit(slow, 1, 1, FOREVER)
        until(lambda: world.engine.live == 1)
        before = world.engine.steps
        until(lambda before=before: world.engine.steps > before + 10_000)  # type: ignore[misc]
        for handle in (5, 6, 7):
            submit(world.owner, handle, 1, 1)
            assert world.owner.items()[0].handle == handle
        slow.cancel(1)
        count = messages = 0
        while True:
            messages += 1
            for item in slow.items():
                assert item.offset == count
                count += len(item.ids)
            if item.end:
                break
        assert count > 10_000
        assert messages < 8_000
        others = [Others(run=True), Others(run=False)] * (role == "steps")
        while len(slow.reports) < len(others):
            slow.reports.append(slow.receive())
        assert slow.reports == others


def test_an_engine_that_waits_for_readers_makes_no_more_than_they_take(world: World) -> None:
    world.engine.waits_for_readers = True
    slow = world.greeted()
    submit(slow, 1, 1, FOREVER)
    slow.receive()
    steps = -1
    while steps != (steps := world.engine.steps):
        time.sleep(0.2)
    while world.engine.steps == steps:
        slow.receive()
    slow.cancel(1)
    until_end(slow)
    until(lambda: not world.engine.live)


def test_the_next_step_is_due_while_requests_run(world: World) -> None:
    due = world.progress.read
    until(lambda: due() == math.inf)
    submit(world.owner, 1, 1, FOREVER)
    world.owner.receive()
    assert due() <= time.monotonic()
    before = due()
    until(lambda: due() > before)
    world.owner.cancel(1)
    until(lambda: due() == math.inf)


def test_messages_are_no_progress_of_an_engine_that_hangs(world: World) -> None:
    world.engine.hangs = True
    submit(world.owner, 1, 1, FOREVER)
    until(lambda: world.progress.read() <= time.monotonic())
    due = world.progress.read()
    submit(world.owner, 2, 1, FOREVER)
    until(lambda: world.engine.live == 2)
    steps = world.engine.steps
    world.owner.cancel(2)
    until(lambda: world.engine.steps > steps)
    assert world.progress.read() == due


@pytest.mark.parametrize("role", ["owner", "steps", "tokens"])
def test_a_peer_that_dies_leaves_nothing_and_has_a_successor(world: World, role: str) -> None:
    peer, other = world.greeted(role), world.greeted("tokens")
    submit(peer, 1, 1, FOREVER)
    submit(other, 1, 1, FOREVER)
    peer.receive()
    other.receive()
    peer.close()
    until(lambda: world.engine.live == 1)
    other.close()
    until(lambda: world.engine.live == 0)
    successor = world.greeted("owner")
    submit(successor, 1, 1, 1)
    assert successor.items()[0].handle == 1


def test_owners_get_the_kv_cache_and_the_requests_of_other_clients(world: World) -> None:
    world.engine.has_kv_cache = True
    steps, tokens = world.greeted(), world.greeted("tokens")
    assert world.owner.receive() == KVCacheStats(0)
    world.engine.hangs = True
    clients = ((steps, 1), (steps, 2), (tokens, 1))
    for client, handle in clients:
        submit(client, handle, 100, FOREVER)
    while world.owner.receive() != StepLoad(2, 1):
        pass  # at once, however late the next step is
    world.engine.hangs = False
    tokens.cancel(77)
    while world.owner.receive() != KVCacheStats(0.003):
        pass
    for client, handle in clients:
        client.cancel(handle)
    reports = [None]
    while reports[-1] != KVCacheStats(0):  # when the last has ended, whenever it was before
        reports.append(world.owner.receive())
    assert StepLoad(0) in reports
    assert not world.owner.poll(0.3)
    for client in (steps, tokens):
        until_end(client)
        assert not {StepLoad, KVCacheStats} & {*map(type, client.reports)}


def test_front_ends_hear_of_others_before_the_engine_has_their_requests(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, other, tokens = world.greeted(), world.greeted(), world.greeted("tokens")
    run, end = Others(run=True), Others(run=False)
    known: list[Any] = []
    take = world.engine.submit

    def note(number: int, request: Any) -> None:
        known.append(steps.receive() if steps.poll() else None)
        take(number, request)

    monkeypatch.setattr(world.engine, "submit", note)
    for number, (client, first) in enumerate([(other, 1), (tokens, 1), (tokens, REFUSED)], 1):
        submit(client, 2, first, 2)
        until(lambda number=number: len(known) == number)  # type: ignore[misc]
        assert steps.receive() == end
    submit(tokens, 3, 1, FOREVER)
    until(lambda: len(known) == 4)
    tokens.close()
    assert steps.receive() == end
    assert known == [run, run, run, run]
    assert not steps.poll(0.3)


REQUEST = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=10**9))


@contextmanager
def linked() -> Iterator[tuple[EngineClient, FrameSocket]]:
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


def step(*items: StepItem) -> bytes:
    return engine_messages.encode(encode(items))


def test_events_that_queue_up_are_joined() -> None:
    all_sent, slow, ends = threading.Event(), list[TokenEvent](), queue.Queue[Any]()

    def emit(event: TokenEvent) -> None:
        slow.append(event)
        assert all_sent.wait(PATIENCE_S)

    with linked() as (client, theirs):
        client.submit(1, REQUEST, emit)
        client.submit(2, REQUEST, ends.put)
        for n in range(50):
            theirs.send(step(StepItem(1, 0, n, [n], [])))
        theirs.send(step(StepItem(2, 0, 0, [5], [], LENGTH)))
        all_sent.set()
        assert ends.get(timeout=PATIENCE_S).token_ids == [5]
    assert [token for event in slow for token in event.token_ids] == [*range(50)]
    assert len(slow) < 25
    assert isinstance(slow[-1].error, TritonUnavailable)


def test_first_tokens_are_emitted_before_later_ones() -> None:
    order = queue.Queue[str]()
    with linked() as (client, theirs):
        for handle, name in enumerate(["first", "second", "third"]):
            client.submit(handle, REQUEST, lambda event, name=name: order.put(name))
        theirs.send(step(StepItem(0, 0, 0, [5], []), StepItem(1, 0, 0, [5], [])))
        assert [order.get(timeout=PATIENCE_S) for _ in range(2)] == ["first", "second"]
        theirs.send(step(*(StepItem(n, 0, 1, [6], [], LENGTH) for n in range(3))))
        found = [order.get(timeout=PATIENCE_S) for _ in range(3)]
        client.on_kv_cache = lambda: order.put("reported")
    assert found == ["third", "first", "second"]
    assert order.empty()  # Triton that waits for the end takes no metrics


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
def test_joined_events_have_the_tokens_and_ends_of_each_request_in_order(
    items: list[StepItem],
) -> None:
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


def test_a_triton_that_no_server_has_started_has_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_spec.ADDRESS_VARIABLE, raising=False)
    with pytest.raises(TritonUnavailable, match=f"{engine_spec.ADDRESS_VARIABLE} is not set"):
        engine_spec.own_addresses()
