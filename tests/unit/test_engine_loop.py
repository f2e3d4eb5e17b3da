"""Engine loop: several peers of one engine process, with handles of their own."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from step_engines import REFUSED, CountingEngine

from cog_triton.backend.engine_loop import run_engine
from cog_triton.backend.guest_client import GuestClient
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import StepItem, decode
from cog_triton.errors import InvalidArgument, TritonUnavailable
from cog_triton.ipc.connection import Connection as Control
from cog_triton.keeper.keeper_messages import Stop
from cog_triton.system import local_socket
from cog_triton.system.shared_time import SharedTime
from cog_triton.text.sampling import SamplingParams

PATIENCE_S = 10
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
    def __init__(self) -> None:
        self.engine = Engine()
        self.progress = SharedTime()
        self.socket = f"cog-triton-test-{secrets.token_hex(8)}"
        self.control, self._theirs = map(Control, socket.socketpair())
        self._listener = local_socket.listen(self.socket)
        self.ended: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.guests: list[Connection] = []
        self.owner = self.greeted("owner")

    def guest(self, hello: object = "steps") -> Connection:
        connection = local_socket.connect(self.socket)
        self.guests.append(connection)
        connection.send(hello)
        return connection

    def greeted(self, hello: str = "steps") -> Connection:
        connection = self.guest(hello)
        assert receive(connection) == 64
        return connection

    def close(self) -> None:
        self.engine.pause = 0
        if self._thread.is_alive():
            self.control.send(Stop())
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        for connection in [*self.guests, self.control, self._theirs]:
            connection.close()

    def until_over(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            run_engine(self.engine, self._theirs, self._listener, self.progress)
            self.ended.append(None)
        except (EOFError, OSError) as error:
            self.ended.append(error)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def receive(connection: Connection) -> Any:
    assert connection.poll(PATIENCE_S), "no message came"
    return connection.recv()


def submit(connection: Connection, handle: int, first: int, count: int, **values: Any) -> None:
    sampling = SamplingParams(max_tokens=count)
    connection.send(
        ("submit", handle, EngineRequest(input_ids=[first], sampling=sampling, **values))
    )


def items_of(message: Any) -> list[StepItem]:
    kind, items, log_probs, errors = message
    assert kind == "step"
    return decode(array("q", items).tolist(), array("f", log_probs), errors)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_peer_gets_its_own_handles_and_kind_of_message(world: World) -> None:
    steps, tokens = world.greeted("steps"), world.greeted("tokens")
    for connection, first in ((world.owner, 100), (steps, 200), (tokens, 300)):
        submit(connection, 1, first, 3)
    for connection, first in ((world.owner, 100), (tokens, 300)):
        events: list[tuple[int, TokenEvent]] = []
        while not events or events[-1][1].finish is None:
            events += receive(connection)
        assert {handle for handle, _ in events} == {1}
        ids = [token for _, event in events for token in event.token_ids]
        assert ids == [first + 1, first + 2, first + 3]
    items: list[StepItem] = []
    while not items or not items[-1].end:
        items += items_of(receive(steps))
    assert items == [
        StepItem(1, 0, 0, [201], []),
        StepItem(1, 0, 1, [202], []),
        StepItem(1, 0, 2, [203], [], 2),
    ]


def test_one_message_holds_the_whole_step(world: World) -> None:
    guest = world.greeted()
    world.engine.pause = 0.05
    for handle in range(1, 9):
        submit(guest, handle, 100 * handle, 20)
    sizes = []
    ended = 0
    while ended < 8:
        items = items_of(receive(guest))
        sizes.append(len(items))
        ended += sum(1 for item in items if item.end)
    assert max(sizes) == 8


def test_steps_are_sent_before_other_peers_get_anything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cog_triton.backend import engine_peers

    sent: list[str] = []
    send = engine_peers.Peer.send

    def note(peer: engine_peers.Peer, message: Any) -> None:
        sent.append(type(peer).__name__)
        send(peer, message)

    tokens, steps = world.greeted("tokens"), world.greeted("steps")
    monkeypatch.setattr(engine_peers.Peer, "send", note)
    world.engine.pause = 0.05
    for connection in (world.owner, tokens, steps):
        submit(connection, 1, 1, 20)
    for connection in (world.owner, tokens, steps):
        receive(connection)
    until(lambda: len(sent) > 30)
    first = sent.index("StepPeer")
    rounds = [list(group) for key, group in itertools.groupby(sent[first:])]
    assert {len(group) for group in rounds[:9]} <= {1, 2}
    assert [group[0] for group in rounds[:4]] == ["StepPeer", "Peer"] * 2


def test_refusals_and_cancellations_are_items(world: World) -> None:
    guest = world.greeted()
    submit(guest, 7, REFUSED, 3)
    (item,) = items_of(receive(guest))
    assert (item.handle, item.end) == (7, 4)
    assert str(item.error).startswith("E1005 InvalidArgument: input_ids")
    submit(guest, 8, 1, FOREVER)
    items = items_of(receive(guest))
    guest.send(("cancel", 8, None))
    guest.send(("cancel", 12345, None))
    while not items[-1].end:
        items += items_of(receive(guest))
    assert (items[-1].handle, items[-1].end) == (8, 3)
    assert [item.offset for item in items] == [
        sum(len(before.ids) for before in items[:place]) for place in range(len(items))
    ]
    assert not world.engine.live


def test_log_probs_are_sent_where_they_were_asked_for(world: World) -> None:
    guest = world.greeted()
    world.engine.step = lambda: [(1, TokenEvent([5], [-0.5], "stop"))]  # type: ignore[method-assign]
    submit(guest, 3, 1, 5, return_log_probs=True)
    (item,) = items_of(receive(guest))
    assert item == StepItem(3, 0, 0, [5], [-0.5], 1, None, 1)


def test_a_guest_that_hangs_up_has_its_requests_cancelled(world: World) -> None:
    guest, other = world.greeted(), world.greeted("tokens")
    submit(guest, 1, 1, FOREVER)
    submit(other, 1, 1, FOREVER)
    receive(guest)
    guest.close()
    until(lambda: world.engine.live == 1)
    other.send(None)
    until(lambda: world.engine.live == 0)
    submit(world.owner, 5, 1, 1)
    assert receive(world.owner)[0][0] == 5


def test_a_guest_that_reads_nothing_holds_up_nobody_and_loses_nothing(world: World) -> None:
    for hello in ("steps", "tokens"):
        slow = world.greeted(hello)
        submit(slow, 1, 1, FOREVER)
        until(lambda: world.engine.live == 1)
        before = world.engine.steps
        until(lambda before=before: world.engine.steps > before + 10_000)  # type: ignore[misc]
        submit(world.owner, 5, 1, 1)
        assert receive(world.owner)[0][0] == 5
        slow.send(("cancel", 1, None))
        count = messages = 0
        while True:
            message = receive(slow)
            messages += 1
            if hello == "steps":
                for item in items_of(message):
                    assert item.offset == count
                    count += len(item.ids)
                ended = bool(item.end)
            else:
                count += sum(len(event.token_ids) for _, event in message)
                ended = message[-1][1].finish is not None
            if ended:
                break
        assert count > 10_000
        assert messages < 8_000


def test_an_engine_that_waits_for_readers_makes_no_more_than_they_take(world: World) -> None:
    world.engine.waits_for_readers = True
    slow = world.greeted()
    submit(slow, 1, 1, FOREVER)
    receive(slow)
    steps = -1
    while steps != (steps := world.engine.steps):
        time.sleep(0.2)
    slow.send(("cancel", 1, None))
    while not items_of(receive(slow))[-1].end:
        pass
    until(lambda: not world.engine.live)


@pytest.mark.parametrize("hello", ["other", 5, None, ("submit", 1, None)])
def test_a_guest_with_another_hello_is_hung_up_on(world: World, hello: object) -> None:
    guest = world.guest(hello)
    with pytest.raises((EOFError, ConnectionError)):
        receive(guest)
    submit(world.owner, 5, 1, 1)
    assert receive(world.owner)[0][0] == 5


def test_a_guest_that_leaves_at_once_does_no_harm(world: World) -> None:
    for _ in range(20):
        local_socket.connect(world.socket).close()
        world.guest().close()
    submit(world.owner, 5, 1, 1)
    assert receive(world.owner)[0][0] == 5


def test_the_next_step_is_due_while_requests_run(world: World) -> None:
    due = world.progress._time
    until(lambda: due[0] == math.inf)
    submit(world.owner, 1, 1, FOREVER)
    receive(world.owner)
    assert due[0] <= time.monotonic()
    before = due[0]
    until(lambda: due[0] > before)
    world.owner.send(("cancel", 1, None))
    until(lambda: due[0] == math.inf)


def test_messages_are_no_progress_of_an_engine_that_hangs(world: World) -> None:
    world.engine.hangs = True
    submit(world.owner, 1, 1, FOREVER)
    until(lambda: world.progress._time[0] <= time.monotonic())
    due = world.progress._time[0]
    submit(world.owner, 2, 1, FOREVER)
    until(lambda: world.engine.live == 2)
    steps = world.engine.steps
    world.owner.send(("cancel", 2, None))
    until(lambda: world.engine.steps > steps)
    assert world.progress._time[0] == due


def test_the_keeper_ends_the_engine(world: World) -> None:
    guest = world.greeted()
    submit(guest, 1, 1, FOREVER)
    receive(guest)
    world.control.send(Stop())
    world.until_over()
    assert world.ended == [None]
    with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012
        while True:
            receive(guest)


def test_the_keepers_death_is_an_error(world: World) -> None:
    world.control.close()
    world.until_over()
    assert isinstance(world.ended[0], EOFError | OSError)


@pytest.mark.parametrize("hello", ["owner", "steps", "tokens"])
def test_a_peer_that_dies_leaves_nothing_and_another_takes_its_place(
    world: World, hello: str
) -> None:
    peer = world.greeted(hello)
    submit(peer, 1, 1, FOREVER)
    receive(peer)
    peer.close()
    until(lambda: world.engine.live == 0)
    successor = world.greeted("owner")
    submit(successor, 1, 1, 1)
    assert receive(successor)[0][0] == 1


def test_other_users_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    with pytest.raises(PermissionError, match="another user"):
        local_socket.connect(world.socket)


def test_a_guest_client_connects_once_the_engine_listens(world: World) -> None:
    client = GuestClient(lambda: world.socket)
    events: list[TokenEvent] = []
    request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=2))
    until(lambda: client._client is not None)
    client.submit(4, request, events.append)
    until(lambda: bool(events) and events[-1].finish is not None)
    assert [token for event in events for token in event.token_ids] == [2, 3]
    client.close()

    early = GuestClient(lambda: f"{world.socket}-nobody")
    with pytest.raises(TritonUnavailable, match="still loading"):
        early.submit(1, request, events.append)
    early.cancel(1)
    early.close()


def test_refused_requests_are_coded_errors_for_token_guests(world: World) -> None:
    guest = world.greeted("tokens")
    submit(guest, 7, REFUSED, 3)
    ((handle, event),) = receive(guest)
    assert handle == 7
    assert isinstance(event.error, InvalidArgument)


def test_the_owner_alone_is_told_of_the_kv_cache(world: World) -> None:
    world.engine.has_kv_cache = True
    steps = world.greeted()
    assert receive(world.owner) == KVCacheStats(0)
    submit(steps, 1, 100, FOREVER)
    submit(steps, 2, 100, FOREVER)
    usage = 0.0
    while usage < 0.002:
        usage = receive(world.owner).usage
    for handle in (1, 2):
        steps.send(("cancel", handle, None))
    while usage:  # told when the last request has ended, whenever it was told before
        usage = receive(world.owner).usage
    assert not world.owner.poll(0.3)
