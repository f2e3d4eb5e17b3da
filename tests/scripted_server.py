"""A real HTTP server on 127.0.0.1 that sends scripted bytes."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import parse_headers
from io import BufferedReader
from threading import Condition, Event, Thread
from typing import Any, Self

PATIENCE_S = 60
"""For what should happen at once."""
RESET = object()
"""Instead of bytes: reset the connection."""
HANG = object()
"""Instead of bytes: send nothing more, until the client closes the connection."""
_NO_LINGER = struct.pack("ii", 1, 0)

Part = bytes | Event | object
"""What is sent, or what is done instead; an event is waited for."""
Answer = Sequence[Part] | Callable[["Request"], Iterable[Part]]


@dataclass
class Request:
    """What came in; `left` is set when the client closed while the answer hung."""

    path: str
    body: bytes
    left: Event = field(default_factory=Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ScriptedServer:
    """Serves from threads of its own, within ``with`` or ``async with``."""

    def __init__(self, answer: Answer) -> None:
        self.answer_with(answer)
        self.requests: list[Request] = []
        self._arrival = Condition()
        self._connections: list[tuple[socket.socket, Thread]] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._acceptor = Thread(target=self._accept)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def answer_with(self, answer: Answer) -> None:
        """Give this answer, or the one it chooses by the request, from now on."""
        self._answer = answer if callable(answer) else lambda _: answer

    def request(self, number: int = 0) -> Request:
        """A request, by the order of arrival; waits for it."""
        with self._arrival:
            assert self._arrival.wait_for(lambda: len(self.requests) > number, PATIENCE_S)
        return self.requests[number]

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._listener:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._acceptor.join()
        for connection, thread in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)

    def _accept(self) -> None:
        with suppress(OSError):  # shut down
            while True:
                connection, _ = self._listener.accept()
                thread = Thread(target=self._serve, args=(connection,))
                self._connections.append((connection, thread))
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError), connection, connection.makefile("rb") as reader:
            while request := _read(reader):
                with self._arrival:
                    self.requests.append(request)
                    self._arrival.notify_all()
                self._send(request, reader, connection)

    def _send(self, request: Request, reader: BufferedReader, connection: socket.socket) -> None:
        for part in self._answer(request):
            if isinstance(part, bytes):
                connection.sendall(part)
                time.sleep(0.002)  # mostly a read of its own; an Event between makes it sure
            elif isinstance(part, Event):
                assert part.wait(PATIENCE_S)
            elif part is HANG:
                with suppress(ConnectionError):
                    reader.read()
                request.left.set()
                raise ConnectionResetError
            else:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                raise ConnectionResetError


def _read(reader: BufferedReader) -> Request | None:
    if not (first := reader.readline()):
        return None
    length = int(parse_headers(reader).get("Content-Length", 0))
    body = reader.read(length)
    return Request(first.decode().split()[1], body) if len(body) == length else None


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until something holds that should soon."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def serving(answer: Answer) -> ScriptedServer:
    """A server that gives the same answer, or the one chosen by the request, every time."""
    return ScriptedServer(answer)


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A complete answer with a length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(*pieces: Part, status: str = "200 OK", end: bool = True) -> list[Part]:
    """A chunked event stream; each piece is sent, and so read, on its own."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
    chunks = [
        b"%x\r\n%b\r\n" % (len(piece), piece) if isinstance(piece, bytes) else piece
        for piece in pieces
    ]
    return [head.encode() + b"\r\n\r\n", *chunks, *([b"0\r\n\r\n"] if end else [])]


def event(**values: Any) -> bytes:
    """One event as Triton writes it."""
    return b"data: " + json.dumps(values).encode() + b"\n\n"
