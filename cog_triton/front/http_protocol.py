"""HTTP/1.1 of the public ports: uvicorn's protocol, with the bounds that it lacks.

A request goes to its application once all of it has arrived. Limits apply while it arrives: a
request that is too large costs no more than the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cog_triton import errors
from cog_triton.front.gate import Gate
from cog_triton.front.message import NO_ROOM, Limits, Refused

_MAX_PIPELINED = 64
# coglet takes 100, of which the front itself writes some.
_MAX_HEADERS = 96
# Sent bytes for each byte of a body: one-byte chunks take six.
_MAX_OVERHEAD = 8
# A client whose half of the connection ends so soon after its request awaits the answer (`nc -N`).
_HALF_CLOSE_S = 0.05
# Closing while a client still sends resets the connection, and takes from it the answer.
_LINGER_S = 2.0
# While the server stops: as long as a request that has been sent may take to be read.
_UNDER_WAY_S = 0.25


class Connections:
    """At most `limit` connections; a new one takes the place of the oldest that awaits no answer.

    Age counts from the last answer. A request that arrives slowly has no more right than none.
    The bodies of their requests have at most `body_bytes` together.
    """

    def __init__(self, limit: int, body_bytes: int) -> None:
        self._limit = limit
        self._free_bytes = body_bytes
        self._open: dict[FrontProtocol, None] = {}
        self.stopping = False
        """Whether no connection is used for another request."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether a connection has a request that arrives or is answered."""
        return not all(one.is_idle for one in self._open)

    @property
    def answering(self) -> bool:
        """Whether a connection awaits the end of an answer."""
        return any(one.is_answered for one in self._open)

    @property
    def may_ask(self) -> bool:
        """Whether a client may have sent a request, before it could see that the server stops."""
        return any(one.may_ask for one in self._open)

    @property
    def has_unread(self) -> bool:
        """Whether a client has not taken what was written."""
        return any(one.has_unread for one in self._open)

    def refuse_reuse(self) -> None:
        """Close idle connections soon, and from now on each one after its next answer."""
        self.stopping = True
        for connection in self._open:
            connection.refuse_reuse()

    def add(self, connection: FrontProtocol) -> bool:
        """Count one more; whether there is room for it."""
        if len(self._open) >= self._limit and not self._close_one():
            return False
        self._open[connection] = None
        return True

    def remove(self, connection: FrontProtocol) -> None:
        self._open.pop(connection, None)

    def used(self, connection: FrontProtocol) -> None:
        """Make it the last one to be closed."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def take_bytes(self, count: int) -> bool:
        """Take so many bytes for a body; whether they were free."""
        if count > self._free_bytes:
            return False
        self._free_bytes -= count
        return True

    def give_bytes(self, count: int) -> None:
        self._free_bytes += count

    def abort_all(self) -> None:
        """Close every connection at once."""
        for connection in list(self._open):
            connection.abort()

    def _close_one(self) -> bool:
        able = [one for one in self._open if not one.is_answered]
        oldest = next((one for one in able if not one.has_unread), next(iter(able), None))
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()  # a client that takes nothing, or no end of TLS, would have its place still
        return True


class PublicPort:
    """What the connections of a port have in common: gate, limits and counts."""

    def __init__(self, gate: Gate, limits: Limits, connections: Connections) -> None:
        self.refusal, self.limits, self.connections = gate.refusal, limits, connections
        self.config = uvicorn.Config(
            gate,
            interface="asgi3",
            http=FrontProtocol,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            reset_contextvars=True,  # else a request begins with the id of the one before it
        )
        self.state = ServerState()

    def connection(self) -> FrontProtocol:
        """A protocol for one more connection."""
        return FrontProtocol(self)


class FrontProtocol(HttpToolsProtocol):
    """One connection of a client, which is also the ``connection`` of its requests' scopes."""

    def __init__(self, port: PublicPort) -> None:
        super().__init__(port.config, port.state, {}, asyncio.get_running_loop())
        self.parser = httptools.HttpRequestParser(self)  # a strict one
        self._port, self._limits, self._connections = port, port.limits, port.connections
        self._refused: Refused | None = None
        self._waiting: Any = None  # the cycle whose request has begun to arrive
        self._answered: Any = None  # the cycle whose request the application has
        self._asked_at = 0.0
        self._arriving = self._half_closed = self._lingering = self._made_late = False
        self._parses = False
        self._unread: asyncio.TimerHandle | None = None
        self._between = self._in_head = True
        self._sent_bytes = self._head_bytes = 0

    # What arrives

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._made_late = self._connections.stopping
        if not self._connections.add(self):
            limit = self._limits.connections
            rule = f"{limit} connections ask for something, as many as may be open; try again"
            self._refuse(Refused(503, errors.Overloaded(rule)))
            return
        # While the server stops, to refuse the first request by name.
        self._wait(_LINGER_S if self._made_late else self._limits.idle_s, self.close)

    def data_received(self, data: bytes) -> None:
        if self._lingering or self.transport.is_closing():
            return
        self._sent_bytes += len(data)
        self._parses = True
        try:
            while data:
                data = self._parsed(data)
            if self._in_head and self._sent_bytes > self._limits.header_bytes:
                raise self._too_many_headers()
            if self._sent_bytes > _MAX_OVERHEAD * self._limits.body_bytes + (1 << 20):
                raise self._too_large(f"more than {self._limits.body_bytes} bytes as sent")
        except Refused as refused:
            if self.is_answered:
                self.abort()
            else:
                self._refuse(refused)
            return
        finally:
            self._parses = False
        if (whole := self._waiting) is not None and not whole.more_body:
            self._start_asgi_task(whole, self.app)
        elif not self.is_answered:
            self._await_request()

    def _parsed(self, data: bytes) -> bytes:
        """Parse `data` as far as llhttp does; returns what is left of it."""
        rest = b""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if self._refused is None:
                rule = str(error) or type(error).__name__
                problem = errors.InvalidArgument(f"request: not HTTP/1.1: {rule}")
                raise Refused(400, problem) from error
        if self._refused is not None:
            raise self._refused
        return rest

    def _without_upgrade(self) -> bytes:
        """The head that was parsed last, to be parsed again as if it asked for no other protocol.

        llhttp takes such a request to end with its head (RFC 9110, 7.8, lets a server ignore it).
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.parser = httptools.HttpRequestParser(self)
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(Any, self.scope)["connection"] = self
        self._between, self._in_head, self._head_bytes = False, True, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nothing that was decided on the headers may change
        super().on_header(name, value.strip())
        if len(self.headers) > _MAX_HEADERS:
            rule = f"headers: more than {_MAX_HEADERS}"
            self._end(Refused(431, errors.RequestTooLarge(rule)))
        self._count_head(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.url[:1] != b"/":
            self._refuse_as(400, "request: the target must begin with /")
        if self.parser.get_method() == b"CONNECT":  # whose head llhttp takes for the whole request
            self._refuse_as(400, "request: CONNECT is of proxies")
        names = [name for name, _ in self.headers]
        if names.count(b"host") > 1:
            self._refuse_as(400, "Host: must be given once")
        lengths = [value for name, value in self.headers if name == b"content-length"]
        if len(lengths) + names.count(b"transfer-encoding") > 1:
            self._refuse_as(400, "Content-Length: must be given once, without Transfer-Encoding")
        if lengths and int(lengths[0]) > self._limits.body_bytes:
            self._end(self._too_large(f"{int(lengths[0])} bytes"))
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) + 1 >= _MAX_PIPELINED:
            rule = f"requests: {_MAX_PIPELINED} at most before the first is answered"
            self._refuse_as(400, rule)
        target, self.url = self.url, b"/"  # uvicorn's parser takes only ASCII
        super().on_headers_complete()
        self.url, self.scope["raw_path"] = target, target
        cast(Any, self.cycle).size = 0
        self.cycle.keep_alive = self.parser.should_keep_alive()
        self.cycle.transport = cast(Any, _HeadAndBody(self.transport, self.loop))
        if self.parser.get_http_version() == "1.0":
            _send_no_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self.parser.should_upgrade():
            return
        self.cycle.waiting_for_100_continue = False
        self.cycle.body += body
        if len(self.cycle.body) > self._limits.body_bytes:
            self._end(self._too_large(f"more than {self._limits.body_bytes} bytes"))
        if not self._take(self.cycle, len(body)):
            self._end(Refused(503, errors.Overloaded(NO_ROOM)))

    def on_message_complete(self) -> None:
        self._in_head, self._sent_bytes = True, 0
        if self.parser.should_upgrade():
            return
        self._between = True
        super().on_message_complete()

    def eof_received(self) -> Any:
        if self._lingering or not self.transport.can_write_eof():
            return False
        asked = self.is_answered and not self._answered.response_started
        self._half_closed = asked and self.loop.time() - self._asked_at < _HALF_CLOSE_S
        return self._half_closed

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._unset_keepalive_if_required()
        queued = [cycle for cycle, _ in self.pipeline]
        for cycle in {*queued, self._waiting, self._answered, self.cycle} - {None}:
            if cycle is not self._answered:  # the application may still have that one's body
                self._give(cycle)
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        if self._unread is not None:
            self._unread.cancel()

    # What is answered

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        waits = cycle.more_body or self._parses
        self._waiting = cycle if waits else None
        if waits:
            return
        self._answered, self._asked_at, self._arriving = cycle, self.loop.time(), False
        self._unset_keepalive_if_required()
        if self._connections.stopping:
            cycle.keep_alive = False
        cycle.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        if cycle.keep_alive:
            cycle.default_headers.append((b"connection", b"keep-alive"))
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        ended, self._answered = self._answered, None
        self._give(ended)
        ended.transport.flush()
        super().on_response_complete()
        if self.transport.is_closing():
            self.close()
        elif not self.is_answered:
            self._await_request()

    def _await_request(self) -> None:
        if (waiting := self._waiting) is not None and waiting.waiting_for_100_continue:
            waiting.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._half_closed:
            self.close()
        elif self._between:
            self._connections.used(self)
            if self._connections.stopping:
                self.close_soon()
            else:
                self._wait(self._limits.idle_s, self.close)
        elif not self._arriving:
            self._arriving = True
            self._wait(self._limits.arrival_s, self._too_slow)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.idle_s, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    @property
    def unaware(self) -> bool:
        """Whether the client of a request could not know that the server stops."""
        return self._connections.stopping and not self._made_late

    @property
    def begun(self) -> bool:
        """Whether the answer to a request has begun."""
        return self._answered is None or self._answered.response_started

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been asked that is not answered, and read by the client's side."""
        asks = self.is_answered or not self._between or self.has_unread
        return self._lingering or not asks

    @property
    def may_ask(self) -> bool:
        """Whether it is from before the server was to stop, and not closed yet."""
        return (
            self.is_idle and self.unaware and not (self._lingering or self.transport.is_closing())
        )

    @property
    def is_answered(self) -> bool:
        """Whether a request has arrived whole, and its answer has not left whole."""
        return self._answered is not None

    @property
    def has_unread(self) -> bool:
        """Whether something was written that its client has not taken."""
        return bool(self.transport.get_write_buffer_size())

    def take_bytes(self, count: int) -> bool:
        """Take so many bytes more for the body that is answered; whether they were free."""
        return self._answered is not None and self._take(self._answered, count)

    def on_application_end(self, scope: Scope) -> None:
        """Give back the bytes of a body whose answer has not left whole."""
        if self._answered is not None and self._answered.scope is scope:
            self._give(self._answered)

    def close(self) -> None:
        """Close the connection once what was written is read, or is not read for too long."""
        if self.has_unread:
            self._wait(self._limits.idle_s, self.abort)
        else:
            self._unset_keepalive_if_required()
        self.transport.close()

    def refuse_reuse(self) -> None:
        """Close the connection soon, or after an answer that is the last one and has not begun."""
        if self.is_idle:
            self.close_soon()
        elif self._between and not (self.begun or self.pipeline):
            answered = self._answered
            answered.keep_alive, answered.default_headers = False, answered.default_headers[:1]

    def close_soon(self) -> None:
        """Close the connection unless a request is under way to it: closing now would reset it."""
        self._wait(_UNDER_WAY_S, self.close)

    def abort(self) -> None:
        """Close the connection at once: a close would look like an end."""
        if self._answered is not None:
            self._answered.disconnected = True
        self.transport.abort()

    def _take(self, cycle: Any, count: int) -> bool:
        taken = self._connections.take_bytes(count)
        cycle.size += count if taken else 0
        return taken

    def _give(self, cycle: Any) -> None:
        self._connections.give_bytes(cycle.size)
        cycle.size = 0

    def _refuse(self, refused: Refused) -> None:
        """Answer what cannot be taken, and close; what the client still sends is passed over."""
        if not self.transport.is_closing():
            path = (self.url if self.scope else b"").partition(b"?")[0].decode("utf-8", "replace")
            refused.log(path)
            answer = self._port.refusal(refused.status, refused.error, path)
            self.transport.write(answer.encoded())
            self._lingering = True
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:
                self.transport.close()
            self._wait(_LINGER_S, self.transport.abort)

    def _too_slow(self) -> None:
        rule = f"the request took longer than {self._limits.arrival_s:g} s to arrive"
        self._refuse(Refused(408, errors.RequestTimeout(f"{rule} (REQUEST_TIMEOUT)")))

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(seconds, then)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.header_bytes:
            self._end(self._too_many_headers())

    def _refuse_as(self, status: int, rule: str) -> None:
        self._end(Refused(status, errors.InvalidArgument(rule)))

    def _end(self, refused: Refused) -> None:
        """End the parse: llhttp has no other way out of a callback."""
        self._refused = self._refused or refused
        raise refused

    def _too_many_headers(self) -> Refused:
        limit = self._limits.header_bytes
        rule = f"request line and headers: more than {limit} bytes (MAX_HEADER_BYTES)"
        return Refused(431, errors.RequestTooLarge(rule))

    def _too_large(self, size: str) -> Refused:
        limit = self._limits.body_bytes
        rule = f"the body has {size}; MAX_REQUEST_BYTES is {limit}"
        return Refused(413, errors.RequestTooLarge(rule))


def _send_no_chunks(cycle: RequestResponseCycle) -> None:
    """Have an answer of unknown length end with its connection: HTTP/1.0 has no chunks."""
    send = cycle.send

    async def plain(message: Message) -> None:
        names = [name.lower() for name, _ in message.get("headers", ())]
        if not cycle.response_started and b"content-length" not in names:
            cycle.keep_alive, cycle.default_headers = False, cycle.default_headers[:1]
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))
        await send(cast(Any, message))

    cast(Any, cycle).send = plain


class _HeadAndBody:
    """Writes the head of an answer together with what follows at once: a call costs 20 us."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            self._loop.call_soon(self.flush)
        else:
            self.flush(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self, data: bytes = b"") -> None:
        head, self._head = self._head, b""
        if (head or data) and not self._transport.is_closing():
            self._transport.write((head or b"") + data)
