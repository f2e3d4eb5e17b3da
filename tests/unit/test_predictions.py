"""Predictions of Cog over the server's socket, of a Triton with scripted responses."""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_thread import PORTAL, call
from openai_server import THREE, TOKENIZER, tokens
from raw_clients import FrameSocket
from scripted_server import HANG, PATIENCE_S
from scripted_triton import Answer, ScriptedTriton, event, to_error

from cog_triton.engines.base import Abilities, EngineLimits
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.ipc.framing import frame
from cog_triton.ipc.messages import encode
from cog_triton.serving import cog_socket, predictions
from cog_triton.serving.cog_messages import CANCELLED, END, ERROR, OUTPUT, Predict
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.predictions import Output, PieceMerger, Predictions
from cog_triton.serving.tenants import Tenant
from cog_triton.settings import load_settings
from cog_triton.system import local_socket

CHECK = "check"


class Served:
    """Predictions at the socket `name`; an event loop on a thread obeys orders, and observes."""

    def __init__(self, triton: ScriptedTriton, runtime: Any) -> None:
        self.triton, self.runtime = triton, runtime
        self.name = f"test-predictions-{secrets.token_hex(8)}"
        self.generations: list[tuple[Any, ...]] = []
        self.refusals: list[tuple[Any, ...]] = []
        self.tenants: dict[str, Tenant] = {}

    def ended(self, *ended: Any) -> None:
        self.generations.append(ended)

    def refused(self, *refused: Any) -> None:
        self.refusals.append(refused)

    async def listen(self, listening: Event) -> None:
        self.running = Predictions(self.runtime, self, CHECK, self.tenants.get)

        async def obey(order: Any, exchange: cog_socket.Exchange) -> None:
            await self.running.run(order, exchange.prediction, exchange.send)

        async with await cog_socket.listen(self.name, obey):
            self.end = asyncio.Event()
            listening.set()
            await self.end.wait()

    def order(self, order: object) -> FrameSocket:
        own = FrameSocket(local_socket.connect(self.name))
        own.socket.settimeout(PATIENCE_S)
        own.send(encode(order))
        return own

    def begin(self, name: str = "one", **inputs: Any) -> FrameSocket:
        mock = inputs.pop("mock", False)
        return self.order(Predict(name, {"prompt": "Hi", **inputs}, mock))

    def predict(self, name: str = "one", **inputs: Any) -> Frames:
        return Frames(self.begin(name, **inputs))

    def cancel(self, name: str = "one") -> None:
        call(self.running.cancel, name)


class Frames:
    """All that answers an order."""

    def __init__(self, own: FrameSocket) -> None:
        self._payloads: list[bytes] = []
        with suppress(EOFError):
            while True:
                self._payloads.append(own.receive())
        own.close()
        self.kinds = [payload[:1] for payload in self._payloads]
        self.text, self.error = ("".join(self.of(kind)) for kind in (OUTPUT, ERROR))

    def of(self, kind: bytes) -> list[str]:
        return [each[1:].decode() for each in self._payloads if each[:1] == kind]


@contextmanager
def serving(answer: Answer, abilities: Abilities | None = None, **options: Any) -> Iterator[Served]:
    with ScriptedTriton(answer) as triton, triton.connected() as transport:
        settings = load_settings(served_model_name="small", **options)
        limits = EngineLimits(
            max_input_len=900, max_seq_len=1000, max_batch_size=4, end_id=None, pad_id=None
        )
        family: Any = SimpleNamespace(abilities=abilities or Abilities())
        family.defaults = MockOptions(prefill_ms=1000)
        runtime = SimpleNamespace(
            settings=settings, family=family, tokenizer=TOKENIZER, sampling_defaults={}
        )
        served, listening = Served(triton, runtime), Event()
        runtime.generator = TextGenerator(
            settings, limits, TOKENIZER, transport, to_error, observer=served
        )
        running = PORTAL.start_task_soon(served.listen, listening)
        assert listening.wait(PATIENCE_S)
        try:
            yield served
        finally:
            call(served.end.set)
            running.result()


def until_begun(own: FrameSocket) -> None:
    while own.receive() != OUTPUT + b"the ":
        pass


def test_an_error_of_the_engine_comes_after_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_BUSY_PER_S": 0, "_SAMPLE": 1, "_LONGEST_S": PATIENCE_S}.items():
        monkeypatch.setattr(predictions, name, value)
    seen = Event()
    with serving([*tokens("the "), seen, *tokens("end"), event(error="broken")]) as served:
        own = served.begin()
        until_begun(own)
        seen.set()
        found = Frames(own)
    assert found.kinds == [OUTPUT, ERROR]
    assert (found.text, found.error[:6]) == ("end", "E2100 ")


def test_a_running_one_is_cancelled_by_its_id_or_hang_up(caplog: pytest.LogCaptureFixture) -> None:
    with serving([*tokens("the "), HANG]) as served:
        owns = {name: served.begin(name) for name in ("one", "other", "left")}
        for own in owns.values():
            until_begun(own)
        owns.pop("left").close()
        for name, own in owns.items():
            served.cancel(name)
            assert Frames(own).kinds == [CANCELLED]
        assert all(served.triton.request(number).left.wait(PATIENCE_S) for number in range(3))
    del served  # which has observed the errors
    gc.collect()
    assert caplog.text == "", "of an error that nobody has seen"


def test_one_that_is_still_planned_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = Event(), Event()

    def encode_late(*_: object, **__: object) -> list[int]:
        reached.set()
        assert go.wait(PATIENCE_S)
        return [1]

    with serving(THREE) as served:
        monkeypatch.setattr(served.runtime.generator, "encode", encode_late)
        own = served.begin()
        assert reached.wait(PATIENCE_S)
        served.cancel()
        go.set()
        assert Frames(own).kinds[-1] == CANCELLED
        assert served.triton.requests == []
        ((_, result, _),) = served.generations
        assert result.cancelled


def test_one_that_is_still_to_come_is_cancelled_once_and_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(THREE) as served:
        served.cancel()
        assert served.predict("other").kinds[-1] == END
        assert served.predict().kinds[-1] == CANCELLED
        assert len(served.triton.requests) == 1
        for _ in range(2):
            assert served.predict().kinds[-1] == END
            served.cancel()  # it has just ended
        served.cancel("early")
        assert served.predict("ended").kinds[-1] == END
        monkeypatch.setattr(predictions, "_EARLY_S", 0)
        served.cancel("other")
        monkeypatch.undo()
        served.cancel("ended")
        assert served.predict("early").kinds[-1] == END
        assert served.predict("ended").kinds[-1] == CANCELLED


def test_a_prediction_is_of_the_tenant_that_its_id_has() -> None:
    tenants = {"a": Tenant(name="a", models=("other",)), "b": Tenant(name="b")}
    with serving(THREE) as served:
        served.tenants.update(tenants)
        assert served.predict("a").error.startswith("E1009 ")
        assert served.predict("b").kinds[-1] == END
        assert served.predict("c").kinds[-1] == END
        found = [ended[0].tenant for ended in served.generations]
    assert found == [tenants["b"], None]


def test_orders_of_other_users_and_those_that_are_none_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(sent: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as own, suppress(ConnectionError):
            own.settimeout(PATIENCE_S)
            own.connect(local_socket.address(served.name))
            own.sendall(sent)
            return own.recv(1)
        return b""

    order = frame(encode(Predict("one", {})))
    with serving(THREE) as served:
        assert answer(order)
        assert not answer(order.replace(b"Predict", b"Pretend"))
        assert not answer(b"\x40\0\0\1")  # more than 1 GiB is to come
        monkeypatch.setattr(local_socket, "is_same_user", lambda _: False)
        assert not answer(order)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still."""

    now = 100.0

    def time(self) -> float:
        return self.now


Act = Callable[[Clock, PieceMerger], Coroutine[Any, Any, None]]


def with_clock(act: Act, per_s: float = 2500) -> None:
    """`act` once the merger has got 128 pieces at this rate."""
    clock = Clock()

    async def run() -> None:
        merger = PieceMerger()
        for _ in range(2 * 64):
            merger.put(output()[0], "x", 1)
            clock.now += 1 / per_s
        await act(clock, merger)

    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(run())


def output(size: float = 0) -> tuple[Output, list[str]]:
    found: list[str] = []
    return Output(lambda kind, text="", **_: found.append(text), size), found


@given(
    st.sampled_from([0, 1, 3, 20, float("inf")]),
    st.sampled_from([1000, 2500]),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "bc"]), st.integers(1, 9))),
)
def test_merged_text_is_complete_and_no_piece_is_too_small(
    size: float, per_s: float, steps: list[tuple[int, str, int]]
) -> None:
    async def act(clock: Clock, merger: PieceMerger) -> None:
        outputs, counts = [output(size) for _ in range(3)], [0] * 3
        for place, text, count in steps:
            counts[place] += count
            merger.put(outputs[place][0], text, counts[place])
            clock.now += 0.01
            await asyncio.sleep(0)
        for place, (own, found) in enumerate(outputs):
            own.flush(float("inf"))
            assert "".join(found) == "".join(text for at, text, _ in steps if at == place)
            assert len(found) <= counts[place] // max(size, 1) + 1

    with_clock(act, per_s)
