"""One request to a server behind the door, and its response, passed on as it comes.

The head of the response is read and written anew; what follows is not parsed. Every request has
a connection of its own, which the server closes when it has answered: its end is the response's.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from cog_triton.door.message import Answer, Forward, Headers, end_to_end

_TURN_S = 0.001
_BUSY_PER_S = 2000
_SAMPLE = 64
_HURRY_S = 0.003


class ReadCoalescing:
    """Lets the event loop pass pieces on once a millisecond, while they are many.

    A wake-up of the process costs as much as passing a piece on. While 2000 pieces a second or more
    come, those of a millisecond are read at one wake-up, half a millisecond later on average. Where
    the machine is too busy for more turns than that anyway, no pause is made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._count = 0
        self._since = 0.0
        self._busy = False
        self._pausing = False
        self._last_turn = 0.0
        self._hurry_until = 0.0

    def hurry(self) -> None:
        """Make no pauses for 3 ms: a request is on its way."""
        self._hurry_until = time.monotonic() + _HURRY_S

    def count(self) -> None:
        """Count a piece of a stream that is passed on."""
        self._count += 1
        if self._count == _SAMPLE:
            now = time.monotonic()
            self._busy = _BUSY_PER_S * (now - self._since) <= _SAMPLE
            self._count, self._since = 0, now
        if self._busy and not self._pausing:
            self._pausing = True
            self._loop.call_soon(self._pause)

    def _pause(self) -> None:
        self._pausing = False
        now = time.monotonic()
        rest = self._last_turn + _TURN_S - now
        if rest > 0 and now >= self._hurry_until:
            time.sleep(rest)
            now = time.monotonic()
        self._last_turn = now


_HEAD_END = b"\r\n\r\n"
_MAX_HEAD = 64 << 10
_MAX_REVISED = 1 << 20
_LAST_CHUNK = b"0\r\n\r\n"
EVENT_END = b"\n\n\r\n"
"""End of an event that is a chunk."""
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (?P<line>(?P<code>[1-5]\d\d)(?: .*|$))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Head of a response; its body has `length` bytes, or else chunks, or lasts until the end."""

    status: int
    line: bytes
    headers: Headers
    length: int | None = None
    chunked: bool = False

    @classmethod
    def parsed(cls, head: bytes, *, head_only: bool) -> ResponseHead | None:
        """The head in these bytes, without the empty line; None if it is not of HTTP/1."""
        first, *lines = head.split(b"\r\n")
        if (found := _STATUS.fullmatch(first)) is None:
            return None
        status = int(found["code"])
        fields = (line.partition(b":") for line in lines)
        headers = [(name.strip().lower(), value.strip()) for name, _, value in fields]
        framing = dict(headers)
        if head_only or status in (204, 304):
            return cls(status, found["line"], headers, 0)
        if b"transfer-encoding" in framing:
            return cls(status, found["line"], headers, chunked=True)
        length = framing.get(b"content-length", b"")
        return cls(status, found["line"], headers, int(length) if length.isdigit() else None)

    @property
    def streams_events(self) -> bool:
        """Whether events follow, in chunks."""
        kinds = [value for name, value in self.headers if name == b"content-type"]
        return self.chunked and any(kind.startswith(b"text/event-stream") for kind in kinds)

    def encoded(self, *, keep_alive: bool) -> bytes:
        """The head anew, with one framing of the body, for a client."""
        kept = {b"transfer-encoding"} if self.chunked else {b"content-length", b"transfer-encoding"}
        framing = {name: value for name, value in self.headers if name in kept}
        written = [b"HTTP/1.1 " + self.line]
        written += [b"%s: %s" % pair for pair in (*end_to_end(self.headers), *framing.items())]
        written.append(b"connection: keep-alive" if keep_alive else b"connection: close")
        return b"\r\n".join(written) + _HEAD_END


class Relay(asyncio.Protocol):
    """Writes the response to `client`, then calls `on_end` once: whether it came whole, and whether
    the client's connection can take another request.

    While `begun` is false, nothing was written.
    """

    def __init__(
        self,
        forward: Forward,
        client: asyncio.WriteTransport,
        keep_alive: bool,
        on_end: Callable[[bool, bool], None],
        coalescing: ReadCoalescing,
    ) -> None:
        self._request: bytes | None = forward.encoded()
        self._head_only = forward.method == "HEAD"
        self._revise = forward.revise
        self._redact = forward.redact
        self._edit = forward.edit
        self._cut = forward.cut
        self._client = client
        self._keep_alive = keep_alive
        self._on_end = on_end
        self._count = coalescing.count
        self._transport: asyncio.Transport | None = None
        self._arrived = bytearray()
        self._head: ResponseHead | None = None
        self._written = b""
        self._kept: bytearray | None = None
        self._remaining: int | None = None
        self._tail = b""
        self._streams = False
        self._ended = False
        self._paused = False
        self.begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from no class of asyncio.
        self._transport = cast(asyncio.Transport, transport)
        if self._paused:
            self._transport.pause_reading()
        assert self._request is not None
        self._transport.write(self._request)
        self._request = None

    def data_received(self, data: bytes) -> None:
        if self._streams:  # the way of tokens
            if self._edit is not None:
                data = self._edit(data)
            self._tail = data[-5:] if len(data) > 4 else (self._tail + data)[-5:]
            self._client.write(data)
            self._count()
            return
        if self._head is None:
            self._arrived += data
            if (head := self._read_head()) is None:
                return
            self._begin(head)
            data, self._arrived = bytes(self._arrived), bytearray()
        if self._redact is not None:
            data = self._redact(data)
        if self._kept is None or (data := self._keep(self._kept, data)):
            self._pass_on(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._head is not None and self._head.chunked:
            self._end(whole=self._tail == _LAST_CHUNK or self._write_last_event())
        else:
            self._end(whole=self.begun and self._remaining is None and error is None)

    def pause(self) -> None:
        """Read no more while the client does not: the server behind gets the backpressure."""
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once: the client has left."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, *, whole: bool) -> None:
        if not self._ended:
            self.abort()
            self._on_end(whole, whole and self._keep_alive)

    def _read_head(self) -> ResponseHead | None:
        """The head, once it is whole, taken from what has arrived; those of 1xx are passed over."""
        while (end := self._arrived.find(_HEAD_END)) >= 0:
            head = ResponseHead.parsed(bytes(self._arrived[:end]), head_only=self._head_only)
            del self._arrived[: end + len(_HEAD_END)]
            if head is None:
                self._end(whole=False)
                return None
            if head.status >= 200:
                return head
        if len(self._arrived) > _MAX_HEAD:
            self._end(whole=False)
        return None

    def _begin(self, head: ResponseHead) -> None:
        """Say what becomes of the body."""
        self._head, self._remaining = head, head.length
        self._keep_alive = self._keep_alive and (head.chunked or head.length is not None)
        if head.status < 400:
            self._redact = None
        if not head.streams_events:
            self._edit, self._cut = None, b""
        short = head.length is not None and head.length <= _MAX_REVISED
        if self._revise and (short or (head.chunked and not head.streams_events)):
            self._kept = bytearray()
        self._written = head.encoded(keep_alive=self._keep_alive)
        self._streams = head.chunked and self._redact is None and self._kept is None

    def _keep(self, kept: bytearray, data: bytes) -> bytes:
        """Keep a response that may be revised; all of it once it is too long to be an error."""
        kept += data
        body = None
        if self._remaining is not None:
            del kept[self._remaining :]
            body = bytes(kept) if len(kept) == self._remaining else None
        elif len(kept) > _MAX_REVISED:
            self._kept = None
            return bytes(kept)
        elif kept.endswith(_LAST_CHUNK):
            body = unchunked(bytes(kept))
        if body is not None:
            self._write_revised(body, kept)
        return b""

    def _write_revised(self, body: bytes, kept: bytes | bytearray) -> None:
        """Write a response that was `kept` whole, and has this `body`, or what is in its place."""
        assert self._revise is not None
        assert self._head is not None
        revised: Answer | None = self._revise(self._head.status, body)
        if revised is None:
            self._write(self._written + kept)
        else:
            self._write(revised.encoded(keep_alive=self._keep_alive, head_only=self._head_only))
        self._end(whole=True)

    def _pass_on(self, data: bytes) -> None:
        if self._remaining is not None:
            data = data[: self._remaining]
            self._remaining -= len(data)
        else:
            data = data if self._edit is None else self._edit(data)
            self._tail = (self._tail + data)[-5:]
        if self._written or data:
            self._write(self._written + data)
            self._written = b""
        if self._remaining == 0:
            self._end(whole=True)

    def _write_last_event(self) -> bool:
        """End an event stream that broke off between two events; whether it did."""
        if self._ended or not self._cut or not ends_between_events(self._tail):
            return False
        self._client.write(last_event(self._cut))
        return True

    def _write(self, data: bytes) -> None:
        self.begun = True
        self._client.write(data)


def unchunked(data: bytes) -> bytes | None:
    """The body of a chunked response; None if it is not whole, or not chunked."""
    chunks: list[bytes] = []
    place = 0
    while head := _CHUNK.match(data, place):
        size = int(head[1], 16)
        if not size:
            return b"".join(chunks)
        chunks.append(data[head.end() : head.end() + size])
        place = head.end() + size + 2
    return None


def ends_between_events(tail: bytes) -> bool:
    """Whether another event can follow bytes of a chunked stream with this end."""
    return not tail or tail.endswith(EVENT_END)


def last_event(event: bytes) -> bytes:
    """One event as a chunk of a response, and the response's end."""
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
