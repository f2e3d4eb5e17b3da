"""One request to a server behind the door, and its response, passed on as it comes.

The head of the response is read and written anew; what follows is not parsed. Every request has
a connection of its own, which the server closes when it has answered: its end is the response's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import cast

from cog_triton.door.event_stream import ends_between_events, last_event
from cog_triton.door.message import Answer, Forward, Headers, end_to_end
from cog_triton.door.read_coalescing import ReadCoalescing

_HEAD_END = b"\r\n\r\n"
_MAX_HEAD = 64 << 10
_MAX_REVISED = 256 << 10
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: |$)")


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
        self._head: bytearray | None = bytearray()
        self._kept: bytearray | None = None
        self._remaining: int | None = None
        self._tail: bytes | None = None
        self._written = b""
        self._status = 0
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
            self._tail = data[-5:] if len(data) > 4 else ((self._tail or b"") + data)[-5:]
            self._client.write(data)
            self._count()
            return
        if self._head is not None:
            data = self._after_head(data)
            if self._head is not None or self._ended:
                return
        if self._redact is not None:
            data = self._redact(data)
        if self._kept is not None:
            self._kept += data
            kept = self._kept
            if self._remaining is not None:
                if len(kept) >= self._remaining:
                    self._write_revised(bytes(kept))
                return
            if len(kept) <= _MAX_REVISED:
                if kept.endswith(_LAST_CHUNK) and (body := unchunked(bytes(kept))) is not None:
                    self._write_revised(body)
                return
            data = bytes(kept)
            self._kept = None  # too long to be an error
        if self._tail is not None:
            if self._edit is not None:
                data = self._edit(data)
            self._tail = (self._tail + data)[-5:]
        elif self._remaining is not None:
            data = data[: self._remaining]
            self._remaining -= len(data)
        if self._written or data:
            self._write(self._written + data)
            self._written = b""
        if self._remaining == 0:
            self._end(whole=True)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._tail is not None:
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

    def break_off(self) -> None:
        """End the response now, as if the server behind had broken off."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, *, whole: bool) -> None:
        if self._ended:
            return
        self.abort()
        self._on_end(whole, whole and self._keep_alive)

    def _after_head(self, data: bytes) -> bytes:
        """Take bytes of the head; once it is whole, write it anew, and return what follows it."""
        assert self._head is not None
        self._head += data
        while (end := self._head.find(_HEAD_END)) >= 0:
            head = bytes(self._head[:end])
            rest = bytes(self._head[end + 4 :])
            status = _STATUS.match(head)
            if status is None:
                break
            if status[1][:1] != b"1":
                self._head = None
                self._status = int(status[1])
                self._take_head(head)
                return rest
            self._head = bytearray(rest)
        if end >= 0 or len(self._head) > _MAX_HEAD:
            self._end(whole=False)
        return b""

    def _take_head(self, head: bytes) -> None:
        status, *lines = head.split(b"\r\n")
        headers: Headers = []
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name.strip().lower(), value.strip()))
        framing = {k: v for k, v in headers if k in (b"content-length", b"transfer-encoding")}
        if self._head_only or self._status in (204, 304):
            self._remaining = 0
        elif b"transfer-encoding" in framing:
            framing.pop(b"content-length", None)
            self._tail = b""
        elif framing.get(b"content-length", b"").isdigit():
            self._remaining = int(framing[b"content-length"])
        else:
            self._keep_alive = False
        if self._status < 400:
            self._redact = None
        if self._tail is None or not _is_event_stream(headers):
            self._edit, self._cut = None, b""
        short = self._remaining is not None and self._remaining <= _MAX_REVISED
        if self._revise and (short or (self._tail is not None and not _is_event_stream(headers))):
            self._kept = bytearray()
        written = [b"HTTP/1.1 " + status.partition(b" ")[2]]
        written += [b"%s: %s" % pair for pair in end_to_end(headers)]
        written += [b"%s: %s" % pair for pair in framing.items()]
        written.append(b"connection: keep-alive" if self._keep_alive else b"connection: close")
        self._written = b"\r\n".join(written) + _HEAD_END
        self._streams = self._tail is not None and self._redact is None and self._kept is None

    def _write_revised(self, body: bytes) -> None:
        """Write a response that was kept whole, and has this `body`, or what is in its place."""
        assert self._kept is not None
        assert self._revise is not None
        revised: Answer | None = self._revise(self._status, body)
        if revised is None:
            self._write(self._written + self._kept)
        else:
            self._write(revised.encoded(keep_alive=self._keep_alive, head_only=self._head_only))
        self._end(whole=True)

    def _write_last_event(self) -> bool:
        """End an event stream that broke off between two events; whether it did."""
        assert self._tail is not None
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


def _is_event_stream(headers: Headers) -> bool:
    return any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
