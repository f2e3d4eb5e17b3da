"""Client of an engine process without threads: messages as they come."""

from __future__ import annotations

import select
import socket
from typing import Any

from cog_triton.engines import engine_messages
from cog_triton.engines.engine_messages import Cancel, Hello
from cog_triton.engines.step_items import EncodedStep, StepItem, decode
from cog_triton.ipc import messages
from cog_triton.ipc.framing import FrameDecoder, frame
from cog_triton.system import local_socket

PATIENCE_S = 60


class FrameSocket:
    """A connected socket that sends and receives frames, and blocks."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self._decoder = FrameDecoder()
        self._arrived: list[bytes] = []

    def send(self, payload: bytes) -> None:
        self.socket.sendall(frame(payload))

    def poll(self, seconds: float = 0.0) -> bool:
        return bool(self._arrived or select.select([self.socket], [], [], seconds)[0])

    def receive(self) -> bytes:
        while not self._arrived:
            if not (data := self.socket.recv(1 << 18)):
                raise EOFError
            self._arrived += self._decoder.feed(data)
        return self._arrived.pop(0)

    def close(self) -> None:
        self.socket.close()


class Control(FrameSocket):
    """The parent's end of the connection with an engine process."""

    def order(self, message: Any) -> None:
        self.send(messages.encode(message))

    def answer(self) -> Any:
        return messages.decode(self.receive())


class RawClient:
    """A connection to an engine process that has sent its hello, and reads when it is asked to."""

    def __init__(self, address: str, role: str = "steps") -> None:
        self.reports: list[Any] = []
        self.frames = FrameSocket(local_socket.connect(address))
        self.send(Hello(role))  # type: ignore[arg-type]

    def greeted(self) -> RawClient:
        """Read the welcome."""
        self.slots = self.receive().max_batch_size
        return self

    def send(self, message: Any) -> None:
        self.frames.send(engine_messages.encode(message))

    def submit(self, handle: int, request: Any) -> None:
        self.frames.send(engine_messages.submit(handle, request))

    def cancel(self, handle: int) -> None:
        self.send(Cancel(handle))

    def poll(self, seconds: float = 0.0) -> bool:
        return self.frames.poll(seconds)

    def receive(self) -> Any:
        assert self.poll(PATIENCE_S), "no message comes"
        return engine_messages.decode(self.frames.receive())

    def items(self) -> list[StepItem]:
        """The next step; `reports` are messages that came before."""
        while not isinstance(step := self.receive(), EncodedStep):
            self.reports.append(step)
        return decode(step.items.tolist(), step.log_probs, step.errors)

    def close(self) -> None:
        self.frames.close()
