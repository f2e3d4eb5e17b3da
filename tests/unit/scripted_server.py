"""A real HTTP server on 127.0.0.1 that answers each request with bytes of the test's choice."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

RESET = object()
"""Instead of bytes: reset the connection."""
HANG = object()
"""Instead of bytes: send nothing more, until the client closes the connection."""
_NO_LINGER = struct.pack("ii", 1, 0)

Part = bytes | object


@dataclass
class Request:
    """What came in; `left` is set when the client closed while the answer hung."""

    path: str
    body: bytes
    left: asyncio.Event

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ScriptedServer:
    def __init__(self, answer: Callable[[Request], Sequence[Part]]) -> None:
        self._answer = answer
        self.requests: list[Request] = []
        self.url = ""

    def answer_with(self, answer: Sequence[Part]) -> None:
        """Give this answer from now on."""
        self._answer = lambda _: answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await _head(reader):
                lines = head.decode().split("\r\n")
                length = next(
                    (int(line[15:]) for line in lines if line.lower().startswith("content-length")),
                    0,
                )
                body = await reader.readexactly(length)
                request = Request(lines[0].split()[1], body, asyncio.Event())
                self.requests.append(request)
                await self._send(request, reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            return  # the client, or the test, is done
        finally:
            writer.close()

    async def _send(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for part in self._answer(request):
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.002)  # a network read of its own
            elif part is HANG:
                await reader.read()
                request.left.set()
                raise ConnectionResetError
            else:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                writer.transport.abort()
                raise ConnectionResetError


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


@asynccontextmanager
async def serving(
    answer: Sequence[Part] | Callable[[Request], Sequence[Part]],
) -> AsyncIterator[ScriptedServer]:
    """A server that gives the same answer, or the one chosen by the request, every time."""
    scripted = ScriptedServer(answer if callable(answer) else lambda _: answer)
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()


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
