"""Step loop: several peers of one engine process, with handles of their own."""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from raw_clients import RawClient
from step_engines import REFUSED, CountingEngine

from cog_triton.engines import engine_messages, engine_server
from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_messages import (
    Cancel,
    Event,
    Hello,
    Others,
    StepLoad,
    Submit,
    Welcome,
)
from cog_triton.engines.engine_orders import Serve, Stop
from cog_triton.engines.engine_server import EngineServer
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import StepItem
from cog_triton.engines.step_loop import run_engine
from cog_triton.engines.vllm.host_messages import MetricsEvent, MetricsRequest
from cog_triton.errors import TritonUnavailable
from cog_triton.ipc import framing
from cog_triton.ipc.connection import Connection
from cog_triton.system import local_socket
from cog_triton.system.shared_time import SharedTime
from cog_triton.text.sampling import SamplingParams

PATIENCE_S = 60
FOREVER = 10**9


class Engine(CountingEngine):
    waits_for_readers = False

    def __init__(self) -> None:
        super().__init__(64)
        self.steps = 0
        self.pause = 0.0
        self.hangs = False

    @property
    def live(self) -> int:
        return len(self._live)

    def wait_s(self) -> float | None:
        return None if self.hangs else super().wait_s()

    def step(self) -> list[tuple[int, TokenEvent]]:
        self.steps += 1
        if self.hangs:
            return []
        if self.pause:
            time.sleep(self.pause)
        return super().step()


class World:
    def __init__(self, address: str = "") -> None:
        self.engine = Engine()
        self.progress = SharedTime()
        self.socket = address or new_address()
        self.control, self._theirs = map(Connection, socket.socketpair())
        self.ended: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.control.send(Serve(self.socket, 3))
        until(self._listens)
        self.guests: list[RawClient] = []
        self.owner = self.greeted("owner")

    def guest(self, role: Any = "steps") -> RawClient:
        client = RawClient(self.socket, role)
        self.guests.append(client)
        return client

    def greeted(self, role: str = "steps") -> RawClient:
        client = self.guest(role).greeted()
        assert client.slots == 64
        return client

    def close(self) -> None:
        self.engine.pause = 0
        if self._thread.is_alive():
            self.control.send(Stop())
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        for connection in [*self.guests, self.control, self._theirs]:
            connection.close()

    def _listens(self) -> bool:
        with suppress(ConnectionRefusedError):
            local_socket.connect(self.socket).close()
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


def new_address() -> str:
    return f"cog-triton-test-{secrets.token_hex(8)}"


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def submit(client: RawClient, handle: int, first: int, count: int, **values: Any) -> None:
    sampling = SamplingParams(max_tokens=count)
    client.submit(handle, EngineRequest(input_ids=[first], sampling=sampling, **values))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_end_of_the_server_comes_once_whatever_takes_its_time() -> None:
    control, theirs = map(Connection, socket.socketpair())
    orders: list[object] = []

    async def end() -> None:
        loop = asyncio.get_running_loop()
        server = EngineServer(Engine(), loop, theirs, orders.append)
        control.close()
        for _ in range(20):
            await asyncio.sleep(0)
        server.close()

    asyncio.run(end())
    assert [type(order) for order in orders] == [EOFError]


@pytest.mark.parametrize("twice", [True, False])
def test_a_peer_that_breaks_the_protocol_is_hung_up_on_alone(world: World, twice: bool) -> None:
    odd = world.greeted("tokens")
    submit(odd, 1, 100, FOREVER)
    if twice:
        submit(odd, 1, 200, FOREVER)
    else:
        odd.send(Hello("tokens"))
    until(lambda: not world.engine.live)
    submit(world.owner, 1, 300, 1)
    assert world.owner.items()[0].ids == [301]


def test_each_peer_gets_its_own_handles(world: World) -> None:
    clients = {world.owner: 100, world.greeted("steps"): 200, world.greeted("tokens"): 300}
    for client, first in clients.items():
        submit(client, 1, first, 3)
    for client, first in clients.items():
        items: list[StepItem] = []
        while not items or not items[-1].end:
            items += client.items()
        assert items == [
            StepItem(1, 0, 0, [first + 1], []),
            StepItem(1, 0, 1, [first + 2], []),
            StepItem(1, 0, 2, [first + 3], [], 2),
        ]


def test_requests_of_steps_stream_and_those_of_others_as_they_ask(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming: list[bool] = []
    take = world.engine.submit

    def note(handle: int, request: EngineRequest) -> None:
        streaming.append(request.streaming)
        take(handle, request)

    monkeypatch.setattr(world.engine, "submit", note)
    for client in (world.greeted("steps"), world.greeted("tokens")):
        submit(client, 1, 1, 1, streaming=False)
        client.items()
    assert streaming == [True, False]


def test_one_message_holds_the_whole_step(world: World) -> None:
    guest = world.greeted()
    world.engine.pause = 0.05
    for handle in range(1, 9):
        submit(guest, handle, 100 * handle, 20)
    sizes = []
    ended = 0
    while ended < 8:
        items = guest.items()
        sizes.append(len(items))
        ended += sum(1 for item in items if item.end)
    assert max(sizes) == 8


def test_steps_are_sent_before_other_peers_get_anything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    flush = engine_server.Peer.flush

    def note(peer: engine_server.Peer) -> None:
        sent.append(str(peer.role))
        flush(peer)

    tokens, steps = world.greeted("tokens"), world.greeted("steps")
    monkeypatch.setattr(engine_server.Peer, "flush", note)
    world.engine.pause = 0.05
    for connection in (world.owner, tokens, steps):
        submit(connection, 1, 1, 20)
    for connection in (world.owner, tokens, steps):
        connection.receive()
    until(lambda: len(sent) > 30)
    first = sent.index("steps")
    assert [role == "steps" for role in sent[first : first + 9]] == [True, False, False] * 3


def test_refusals_and_cancellations_are_items(world: World) -> None:
    guest = world.greeted()
    submit(guest, 7, REFUSED, 3)
    (item,) = guest.items()
    assert (item.handle, item.end) == (7, 4)
    assert str(item.error).startswith("E1005 InvalidArgument: input_ids")
    submit(guest, 8, 1, FOREVER)
    items = guest.items()
    guest.cancel(8)
    guest.cancel(12345)
    while not items[-1].end:
        items += guest.items()
    assert (items[-1].handle, items[-1].end) == (8, 3)
    assert [item.offset for item in items] == [
        sum(len(before.ids) for before in items[:place]) for place in range(len(items))
    ]
    assert not world.engine.live


def test_log_probs_are_sent_where_they_were_asked_for(world: World) -> None:
    guest = world.greeted()
    world.engine.step = lambda: [(1, TokenEvent([5], [-0.5], "stop"))]  # type: ignore[method-assign]
    submit(guest, 3, 1, 5, return_log_probs=True)
    (item,) = guest.items()
    assert item == StepItem(3, 0, 0, [5], [-0.5], 1, None, 1)


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
    slow.cancel(1)
    while not slow.items()[-1].end:
        pass
    until(lambda: not world.engine.live)


@pytest.mark.parametrize("hello", [Hello("other"), Hello(5), Cancel(1), Welcome(4), "no message"])  # type: ignore[arg-type]
def test_a_guest_with_another_hello_is_hung_up_on(world: World, hello: Any) -> None:
    guest = local_socket.connect(world.socket)
    encoded = b"no message" if isinstance(hello, str) else engine_messages.encode(hello)
    guest.sendall(framing.frame(encoded))
    with guest, suppress(ConnectionError):
        assert guest.recv(1) == b""
    submit(world.owner, 5, 1, 1)
    assert world.owner.items()[0].handle == 5


def test_requests_of_a_message_that_breaks_off_are_not_taken(world: World) -> None:
    """Submitted in one piece with what no client says: it is gone before its requests are."""
    guest = world.greeted()
    request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=FOREVER))
    submission = framing.frame(engine_messages.submit(1, request))
    guest.frames.socket.sendall(submission + framing.frame(b"no message") + submission)
    with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012
        while True:
            guest.receive()
    until(lambda: not world.engine.live)


def test_a_request_of_another_version_is_refused_and_others_go_on(world: World) -> None:
    guest = world.greeted()
    submit(guest, 1, 1, FOREVER)
    text = b'["EngineRequest",{"magic":1}]'
    guest.send(Submit(2, struct.pack("!I", len(text)) + text))
    items: list[StepItem] = []
    while not items or items[-1].handle == 1:
        items += guest.items()
    refused = next(item for item in items if item.handle == 2)
    assert str(refused.error).startswith("E2104 TritonMalformedEvent: a request: ")
    assert world.engine.live == 1


def test_a_guest_that_leaves_at_once_does_no_harm(world: World) -> None:
    for _ in range(20):
        local_socket.connect(world.socket).close()
        world.guest().close()
    submit(world.owner, 5, 1, 1)
    assert world.owner.items()[0].handle == 5


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


def test_the_server_ends_the_engine(world: World) -> None:
    guest = world.greeted()
    submit(guest, 1, 1, FOREVER)
    guest.receive()
    world.control.send(Stop())
    world.until_over()
    assert world.ended == [None]
    with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012
        while True:
            guest.receive()


def test_the_servers_death_is_an_error(world: World) -> None:
    world.control.close()
    world.until_over()
    assert isinstance(world.ended[0], EOFError | OSError)


def test_an_address_that_is_taken_is_an_error(world: World) -> None:
    world.control.send(Serve(world.socket, 4))
    world.until_over()
    assert "in use" in str(world.ended[0])


def test_an_engine_says_which_generation_it_is(world: World) -> None:
    assert world.guest().receive() == Welcome(64, 3)


@pytest.mark.parametrize("hello", ["owner", "steps", "tokens"])
def test_a_peer_that_dies_leaves_nothing_and_another_takes_its_place(
    world: World, hello: str
) -> None:
    peer, other = world.greeted(hello), world.greeted("tokens")
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


def test_a_client_connects_once_an_engine_listens_and_again_to_its_successor() -> None:
    address = new_address()
    request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=2))
    client = EngineClient([address], "tokens")
    client.start()
    client.cancel(1)
    with pytest.raises(TritonUnavailable, match="still loading"):
        client.submit(1, request, lambda event: None)
    for _ in range(2):
        world, events = World(address), list[TokenEvent]()
        until(lambda: bool(client.loads()))
        client.submit(4, request, events.append)
        until(lambda events=events: bool(events) and events[-1].finish is not None)  # type: ignore[misc]
        assert [token for event in events for token in event.token_ids] == [2, 3]
        world.close()
        until(lambda: not client.loads())
    client.close()


def test_owners_get_the_kv_cache_and_the_number_of_requests_of_steps(world: World) -> None:
    world.engine.has_kv_cache = True
    steps, tokens = world.greeted(), world.greeted("tokens")
    last: dict[type, Any] = {KVCacheStats: None, StepLoad: StepLoad(2)}

    def reported(usage: float, load: int) -> bool:
        report = world.owner.receive()
        last[type(report)] = report
        return [*last.values()] == [KVCacheStats(usage), StepLoad(load)]

    assert world.owner.receive() == KVCacheStats(0)
    world.engine.hangs = True
    clients = ((steps, 1), (steps, 2), (tokens, 1))
    for client, handle in clients:
        submit(client, handle, 100, FOREVER)
    while world.owner.receive() != StepLoad(2):
        pass  # at once, however late the next step is
    world.engine.hangs = False
    tokens.cancel(77)
    until(lambda: reported(0.003, 2))
    for client, handle in clients:
        client.cancel(handle)
    until(lambda: reported(0, 0))  # when the last request has ended, whenever it was before
    assert not world.owner.poll(0.3)
    for client in (steps, tokens):
        while not client.items()[-1].end:
            pass
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
        if isinstance(request, MetricsRequest):
            world.engine._events.append((number, MetricsEvent({})))  # type: ignore[arg-type]
        else:
            take(number, request)

    monkeypatch.setattr(world.engine, "submit", note)
    tokens.submit(1, MetricsRequest())  # four times a second: nothing dies of it
    assert tokens.receive() == Event(1, MetricsEvent({}))
    for number, (client, first) in enumerate([(other, 1), (tokens, 1), (tokens, REFUSED)], 2):
        submit(client, 2, first, 2)
        until(lambda number=number: len(known) == number)  # type: ignore[misc]
        assert steps.receive() == end
    submit(tokens, 3, 1, FOREVER)
    until(lambda: len(known) == 5)
    tokens.close()
    assert steps.receive() == end
    assert known == [None, run, run, run, run]
    assert not steps.poll(0.3)
