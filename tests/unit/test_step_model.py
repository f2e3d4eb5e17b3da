"""Triton's model ``engine_steps``: a pipe whose front end is behind, and who may open one."""

from __future__ import annotations

import importlib
import secrets
import select
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_server import PATIENCE_S, wait_until

from cog_triton import backend
from cog_triton.engines import engine_messages, step_pipe
from cog_triton.engines.engine_messages import Hello
from cog_triton.ipc.framing import frame
from cog_triton.system import local_socket

FINAL = 1
HELLO = frame(engine_messages.encode(Hello("steps")))


class Response:
    def __init__(self, tensors: Any = (), error: Any = None) -> None:
        self.tensors = tensors
        self.error = error

    def output_tensors(self) -> Any:
        return self.tensors


class Sender:
    """A request: `contents` are the responses of its pipe, `last` is the one with the end."""

    def __init__(self, contents: list[bytes], order: step_pipe.InOrder) -> None:
        self.contents, self.order = contents, order
        self.last: Any = None
        self.ended = threading.Event()
        self.gone = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        if flags == FINAL:
            self.last = response
            self.ended.set()
        else:
            for tensor in response.tensors:
                self.contents += self.order.take(tensor.tobytes())

    def is_cancelled(self) -> bool:
        return self.gone

    @property
    def bytes(self) -> bytes:
        return b"".join(self.contents)


class World:
    """The model, and the engine that listens for it."""

    def __init__(self, module: Any, listener: socket.socket) -> None:
        self.model = module.TritonPythonModel()
        self.model.initialize({})
        self._listener = listener
        self.contents: list[bytes] = []
        self.order = step_pipe.InOrder()

    def call(self, call: bytes, name: str = "pipe") -> Sender:
        sender = Sender(self.contents, self.order)
        tensor = SimpleNamespace(as_numpy=lambda: np.frombuffer(call, np.uint8))
        request = SimpleNamespace(
            get_response_sender=lambda: sender, request_id=lambda: name, tensor=tensor
        )
        self.model.execute([request])
        return sender

    def open(self) -> tuple[Sender, socket.socket]:
        """A front end's end of a pipe, and the engine's."""
        sender = self.call(step_pipe.open_call(0, "secret"))
        self._listener.settimeout(PATIENCE_S)
        self.engine, _ = self._listener.accept()
        self.engine.settimeout(PATIENCE_S)
        assert received(self.engine, len(HELLO)) == HELLO
        return sender, self.engine


def forget_modules() -> None:
    """They have Triton's module, or none."""
    for name in ("python_backend", "triton_log", "step_model"):
        sys.modules.pop(f"cog_triton.backend.{name}", None)
        vars(backend).pop(name, None)  # an import finds either


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    stand_in: Any = ModuleType("triton_python_backend_utils")
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    stand_in.Tensor = lambda name, content: content
    stand_in.InferenceResponse = Response
    stand_in.TritonError = type("TritonError", (str,), {"INTERNAL": 0, "INVALID_ARG": 1})
    stand_in.TritonError.__new__ = lambda cls, text, code: str.__new__(cls, text)
    stand_in.get_input_tensor_by_name = lambda request, name: request.tensor
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    forget_modules()
    monkeypatch.setenv(step_pipe.KEY_VARIABLE, "secret")
    module: Any = importlib.import_module("cog_triton.backend.step_model")
    address = f"cog-triton-test-{secrets.token_hex(8)}"
    monkeypatch.setattr(module, "own_addresses", lambda: [address])
    monkeypatch.setattr(module.triton_log, "install", lambda: None)
    monkeypatch.setattr(module.process_tuning, "tune_for_serving", lambda: None)
    with local_socket.listen(address) as listener:
        world = World(module, listener)
        yield world
        world.model.finalize()
        world.engine.close()
    forget_modules()


def received(engine: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += engine.recv(size - len(content))
    return content


def sent_until_it_waits(sender: Sender, engine: socket.socket, content: bytes) -> int:
    """How much of `content` the pipe takes before it waits for the front end."""
    sent = 0
    while sent < len(content):
        if select.select([], [engine], [], 2)[1]:
            sent += engine.send(content[sent : sent + (1 << 16)])
        elif len(sender.bytes) >= step_pipe.MOST_BYTES:
            break
    return sent


def test_a_front_end_that_is_megabytes_behind_is_waited_for(world: World) -> None:
    sender, engine = world.open()
    content = secrets.token_bytes(12 << 20)
    sent = sent_until_it_waits(sender, engine, content)
    taken = len(sender.bytes)
    assert step_pipe.MOST_BYTES <= taken < step_pipe.MOST_BYTES + (1 << 20)
    assert sent < len(content)
    rest = threading.Thread(target=engine.sendall, args=[content[sent:]])
    rest.start()
    while len(sender.bytes) < len(content):
        earlier, sender = sender, world.call(step_pipe.arrived_call(len(sender.contents)))
        wait_until(lambda taken=taken: sum(map(len, world.contents)) > taken)
        taken = len(sender.bytes)
        assert earlier.ended.wait(PATIENCE_S)
    rest.join()
    assert sender.bytes == content
    engine.close()
    assert sender.ended.wait(PATIENCE_S)
    assert sender.last.error.startswith("E2105 TritonUnavailable: the engine's process has ended")


def test_a_front_end_that_is_many_responses_behind_is_waited_for_and_its_calls_pass(
    world: World,
) -> None:
    sender, engine = world.open()
    for number in range(step_pipe.MOST_RESPONSES):
        engine.send(b"x")
        wait_until(lambda number=number: len(sender.contents) > number)
    engine.send(b"y")
    large = secrets.token_bytes(4 << 20)  # more than a socket takes
    world.call(step_pipe.SEND + large)
    assert received(engine, len(large)) == large
    assert sender.bytes == b"x" * step_pipe.MOST_RESPONSES
    newer = world.call(step_pipe.arrived_call(1))
    wait_until(lambda: newer.bytes[-1:] == b"y")
    world.call(step_pipe.CLOSE)
    for request in (sender, newer):
        assert request.ended.wait(PATIENCE_S)
    assert engine.recv(1) == b""


def test_a_front_end_that_is_gone_is_hung_up_on_though_steps_go_on(world: World) -> None:
    sender, engine = world.open()
    sender.gone = True
    with pytest.raises(BrokenPipeError):  # noqa: PT012
        while True:
            engine.send(b"x")
    assert sender.ended.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (step_pipe.open_call(0, "Secret"), "engine_steps: this model is for"),
        (step_pipe.open_call(1, "secret"), "engine_steps: there is no engine 1"),
        (step_pipe.open_call(0, "secret"), "engine_steps: 'pipe' is open"),
        (step_pipe.OPEN, "invalid literal for int"),
        (step_pipe.ARRIVED, "invalid literal for int"),
    ],
)
def test_calls_that_are_refused(world: World, call: bytes, said: str) -> None:
    world.open()
    refused = world.call(call)
    assert refused.ended.is_set()
    assert refused.last.error.startswith(f"E1005 InvalidArgument: {said}")
