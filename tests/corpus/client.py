"""A client of bytes: what is sent as it is written, answers as they come, no retries."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 60
_NO_BODY = (204, 304)


class Ended(Exception):
    """The server ended the connection."""


@dataclass
class Answer:
    """An answer whose head has come; `pieces` reads its body."""

    status: int
    headers: dict[str, str]
    framing: str
    pieces: Iterator[bytes]
    is_whole: bool = True

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def events(self) -> Iterator[tuple[str, Any]]:
        """Name and data of each server-sent event, as they arrive; data is JSON where it can be."""
        held = b""
        for piece in self.pieces:
            held += piece
            *blocks, held = held.replace(b"\r\n", b"\n").split(b"\n\n")
            yield from (_event(block) for block in blocks if block)
        if held.strip():
            yield "cut off", held.decode("utf-8", "replace")


def _event(block: bytes) -> tuple[str, Any]:
    name, data = "", []
    for line in block.decode("utf-8", "replace").split("\n"):
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        else:
            name = f"{name} {line}".strip()
    text = "\n".join(data)
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


class Connection:
    """One connection to a port of this machine."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:  # before it connects, as the window is agreed on then
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def end(self) -> None:
        """End it for both sides, whatever another thread reads."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, pieces: Any) -> None:
        """Send each piece in turn; what the server has stopped to read is left out."""
        try:
            for piece in pieces if isinstance(pieces, list) else [pieces]:
                if isinstance(piece, dict) and "pause" in piece:
                    time.sleep(piece["pause"])
                elif isinstance(piece, dict) and "slowly" in piece:
                    self._send_slowly(encoded(piece["slowly"]), piece["each"])
                else:
                    self.socket.sendall(encoded(piece))
        except (BrokenPipeError, ConnectionResetError):
            return

    def _send_slowly(self, data: bytes, seconds: float) -> None:
        """A byte at a time, until something comes back."""
        for place in range(len(data)):
            self.socket.sendall(data[place : place + 1])
            self.socket.settimeout(seconds)
            try:
                if self.socket.recv(1, socket.MSG_PEEK) is not None:
                    return
            except TimeoutError:
                continue
            finally:
                self.socket.settimeout(PATIENCE_S)

    def answer(self, method: str = "GET") -> Answer:
        """The head of the next answer; raises `Ended` where none comes."""
        try:
            first = self._file.readline()
            if not first:
                raise Ended
            lines = []
            while (line := self._file.readline()) not in (b"\r\n", b""):
                lines.append(line.decode("latin-1").strip())
        except ConnectionResetError as error:
            raise Ended from error
        status = int(first.split()[1]) if first.startswith(b"HTTP/1.") else 0
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        ends = status < 200 or status in _NO_BODY
        framing = "none" if ends else "length" if "content-length" in headers else "to the end"
        answer = Answer(status, headers, headers.get("transfer-encoding", framing), iter(()))
        if not ends and method != "HEAD":
            answer.pieces = self._pieces(answer)
        return answer

    def _pieces(self, answer: Answer) -> Iterator[bytes]:
        try:
            if answer.framing == "chunked":
                while size := int(self._file.readline().partition(b";")[0] or b"z", 16):
                    yield self._file.read(size)
                    self._file.readline()
                while self._file.readline() not in (b"\r\n", b""):
                    pass
            elif answer.framing == "length":
                data = self._file.read(size := int(answer.headers["content-length"]))
                answer.is_whole = len(data) == size
                yield data
            else:
                yield self._file.read()
        except (ConnectionResetError, ValueError):
            answer.is_whole = False

    def rest(self, most: int = 1 << 40) -> int:
        """How many bytes come before the server ends the connection, or `most`."""
        count = 0
        try:
            while count < most and (data := self._file.read(1 << 16)):
                count += len(data)
        except ConnectionResetError:
            pass
        return count


def encoded(piece: Any) -> bytes:
    """Bytes of a piece of YAML: text of Latin-1, or what makes it."""
    if isinstance(piece, bytes):
        return piece
    if isinstance(piece, str):
        return piece.encode("latin-1")
    if isinstance(piece, list):
        return b"".join(map(encoded, piece))
    if "repeat" in piece:
        return encoded(piece["repeat"]) * piece["times"]
    if "base64" in piece:
        return base64.b64decode(piece["base64"])
    if "gzip" in piece:
        return gzip.compress(encoded(piece["gzip"]))
    if "deflate" in piece:
        return zlib.compress(encoded(piece["deflate"]))
    if "int32" in piece:
        return struct.pack(f"<{len(piece['int32'])}i", *piece["int32"])
    if "head" in piece:  # with the length of its body
        body = encoded(piece.get("body", ""))
        return encoded(piece["head"]) + b"content-length: %d\r\n\r\n" % len(body) + body
    raise ValueError(f"no such piece: {piece}")
