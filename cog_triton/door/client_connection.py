"""Connections of clients: accepted, counted over all ports, and their requests answered."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from cog_triton import errors
from cog_triton.door.gate import Gate
from cog_triton.door.message import Forward, Refused, Request
from cog_triton.door.relay import ReadCoalescing, Relay
from cog_triton.door.request_parser import CONTINUE, Limits, RequestParser
from cog_triton.door.tls import Certificate

BACKLOG = 4096
# Of a burst, the first are served while the rest wait to be accepted.
_AT_ONCE = 16
_RETRY_S = 0.5
_MOST_HANDSHAKES = 512
_HANDSHAKE_S = 10.0
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Accepts connections on a socket; makes a protocol of `factory` for each.

    With a `certificate` they begin with TLS. At most 512 handshakes are under way, each for 10 s:
    a new one takes the place of the oldest.
    """

    def __init__(
        self,
        listening: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        certificate: Certificate | None = None,
    ) -> None:
        listening.setblocking(False)
        self._certificate = certificate
        self._socket = listening
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for task in list(self._tasks):
            self._end(task)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:
                    self._pause(error)
                    return
                continue  # a client that has left already
            task = self._loop.create_task(self._connect(accepted))
            self._tasks[task] = accepted
            task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
            if len(self._tasks) > _MOST_HANDSHAKES:
                self._end(next(iter(self._tasks)))

    async def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        secured: dict[str, Any] = {}
        if self._certificate is not None:
            secured = {"ssl": self._certificate.context, "ssl_handshake_timeout": _HANDSHAKE_S}
            secured["ssl_shutdown_timeout"] = _LINGER_S
        try:
            await self._loop.connect_accepted_socket(self._factory, accepted, **secured)
        except OSError:  # those of ssl, too
            accepted.close()

    def _end(self, task: asyncio.Task[None]) -> None:
        """End a handshake; it counts no more, though it ends in a moment only."""
        accepted = self._tasks.pop(task)
        task.add_done_callback(lambda _: accepted.close() if task.cancelled() else None)
        task.cancel()

    def _pause(self, error: OSError) -> None:
        """Leave new connections in the backlog until others have ended."""
        _LOG.error("%s", errors.Overloaded(f"no connection can be accepted: {error.strerror}"))
        self._loop.remove_reader(self._socket)
        self._loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)


# A client whose half of the connection ends so soon after its request awaits the answer (`nc -N`).
_HALF_CLOSE_S = 0.05
# Closing while a client still sends resets the connection, and takes from it the answer.
_LINGER_S = 2.0
# While the server stops: as long as a request that has been sent may take to be read.
_UNDER_WAY_S = 0.25
_LOG = logging.getLogger(__name__)


class Connections:
    """At most `limit` connections; a new one takes the place of the oldest that awaits no answer.

    Age counts from the last answer. A request that arrives slowly has no more right than none.

    The bodies that they hold have at most `body_bytes` together.
    """

    def __init__(self, limit: int, body_bytes: int) -> None:
        self._limit = limit
        self._free_bytes = body_bytes
        self._open: dict[ClientConnection, None] = {}
        self.stopping = False
        """Whether no connection is kept for another request."""

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
        for connection in [one for one in self._open if one.is_idle]:
            connection.close_soon()

    def add(self, connection: ClientConnection) -> bool:
        """Count one more; whether there is room for it."""
        if len(self._open) >= self._limit and not self._close_one():
            return False
        self._open[connection] = None
        return True

    def remove(self, connection: ClientConnection) -> None:
        """Count one less."""
        self._open.pop(connection, None)

    def used(self, connection: ClientConnection) -> None:
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
        """Give back what was taken."""
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
        oldest.abort()  # a client that takes nothing, or no end of TLS, would hold its place
        return True


class ClientConnection(asyncio.Protocol):
    """Takes requests while none is being answered; a client that closes ends what it asked for."""

    def __init__(
        self, gate: Gate, limits: Limits, connections: Connections, coalescing: ReadCoalescing
    ) -> None:
        self._gate = gate
        self._limits = limits
        self._connections = connections
        self._coalescing = coalescing
        self._loop = asyncio.get_running_loop()
        self._relay: Relay | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arriving = False
        self._half_closed = False
        self._lingering = False
        self._asked_at = 0.0
        self._held_bytes = 0
        self._made_late = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports derive from no class of asyncio.
        self._transport = cast(asyncio.Transport, transport)
        self._coalescing.hurry()
        self._made_late = self._connections.stopping
        peer = transport.get_extra_info("peername")
        self._parser = RequestParser(self._limits, str(peer[0]) if peer else "", self._take_bytes)
        if not self._connections.add(self):
            limit = self._limits.connections
            rule = f"{limit} connections ask for something, as many as may be open; try again"
            self._refuse(Refused(503, errors.Overloaded(rule)))
            return
        # While the server stops, to refuse the first request by name.
        first_s = _LINGER_S if self._connections.stopping else self._limits.idle_s
        self._wait(first_s, self.close)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing() or self._lingering:
            return
        self._coalescing.hurry()
        try:
            self._parser.feed(data)
        except Refused as refused:
            if self._task is None:
                self._refuse(refused)
            else:
                self._transport.abort()
            return
        if self._task is None:
            self._next()
        elif self._parser.complete:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        if self._lingering or not self._transport.can_write_eof():
            return False
        asked = self._task is not None and not (self._relay and self._relay.begun)
        self._half_closed = asked and self._loop.time() - self._asked_at < _HALF_CLOSE_S
        return self._half_closed

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove(self)
        self._connections.give_bytes(self._held_bytes)
        self._held_bytes = 0
        self._cancel_timer()
        if self._relay is not None:
            self._relay.abort()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        if self._relay is not None:
            self._relay.pause()
        self._wait(self._limits.idle_s, self._transport.abort)

    def resume_writing(self) -> None:
        self._cancel_timer()
        if self._relay is not None:
            self._relay.resume()
        elif self._task is None and not self._transport.is_closing():
            self._arriving = False
            self._next()

    @property
    def is_idle(self) -> bool:
        """Whether nothing has been asked that is not answered, and read by the client's side."""
        return self._lingering or (
            self._task is None and self._parser.is_between_requests and not self.has_unread
        )

    @property
    def may_ask(self) -> bool:
        """Whether it is from before the server was to stop, and not closed yet."""
        late = self._made_late or not self._connections.stopping
        return self.is_idle and not (late or self._lingering or self._transport.is_closing())

    @property
    def is_answered(self) -> bool:
        """Whether a request has arrived whole, and its answer has not left whole."""
        return self._task is not None

    @property
    def has_unread(self) -> bool:
        """Whether something was written that its client has not taken."""
        return bool(self._transport.get_write_buffer_size())

    def close(self) -> None:
        """Close the connection once what was written is read, or is not read for too long."""
        if self.has_unread:
            self._wait(self._limits.idle_s, self._transport.abort)
        else:
            self._cancel_timer()
        self._transport.close()

    def close_soon(self) -> None:
        """Close the connection unless a request is under way to it: closing now would reset it."""
        self._wait(_UNDER_WAY_S, self.close)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _take_bytes(self, count: int) -> bool:
        if not self._connections.take_bytes(count):
            return False
        self._held_bytes += count
        return True

    def _next(self) -> None:
        """Begin with the next request that is whole, else wait for one with a time limit."""
        if self._parser.wants_continue:
            self._parser.wants_continue = False
            self._transport.write(CONTINUE)
        if self._parser.complete:
            self._arriving = False
            self._cancel_timer()
            self._asked_at = self._loop.time()
            request = self._parser.complete.popleft()
            self._task = self._loop.create_task(self._answer(request))
            self._task.add_done_callback(self._on_answered)
        elif self._half_closed:
            self.close()
        elif self._parser.is_between_requests:
            self._connections.used(self)
            if self._connections.stopping:
                self.close_soon()
            else:
                self._wait(self._limits.idle_s, self.close)
        elif not self._arriving:
            self._arriving = True
            self._wait(self._limits.arrival_s, self._too_slow)

    async def _answer(self, request: Request) -> None:
        keep_alive = request.keep_alive and not self._connections.stopping
        if self._connections.stopping and not self._made_late:  # sent before it could see that
            request = replace(request, unaware=True)
        head_only, reads = request.method == "HEAD", request.method in ("GET", "HEAD")
        size, path = len(request.body), request.path

        def take_bytes(count: int) -> bool:
            nonlocal size
            taken = self._take_bytes(count)
            size += count if taken else 0
            return taken

        request = replace(request, take_bytes=take_bytes)
        try:
            decided = await self._gate.decide(request)
            if isinstance(decided, Forward):
                del request  # its body is written once, and need not be kept until the answer ends
                keep_alive = await self._forward(decided, keep_alive)
                self._done(keep_alive, size)
                return
        except Refused as refused:
            refused.log(path, is_probe=reads and refused.status == 503)
            decided = self._gate.refusal(refused.status, refused.error, path)
        if not self._transport.is_closing():
            self._transport.write(decided.encoded(keep_alive=keep_alive, head_only=head_only))
            self._done(keep_alive, size)

    async def _forward(self, forward: Forward, keep_alive: bool) -> bool:
        """Pass the request on, and the response back; whether the connection can be used on.

        Raises:
            Refused: the server did not answer.
        """
        ended: asyncio.Future[tuple[bool, bool]] = self._loop.create_future()

        def on_end(whole: bool, keep_alive: bool) -> None:
            if not ended.done():
                ended.set_result((whole, keep_alive))

        relay = self._relay = Relay(forward, self._transport, keep_alive, on_end, self._coalescing)
        connections, port, at_end = forward.connections, forward.port, forward.ended
        del forward
        whole = False
        try:
            with connections.request():
                await connections.connect(relay, port)
                whole, keep_alive = await ended
        except OSError:
            pass
        finally:
            self._relay = None
            at_end(whole)
        if not relay.begun:
            error = "the server behind this port does not answer; try again"
            raise Refused(503, errors.TritonUnavailable(error))
        if not whole:
            self._transport.abort()  # a close would look like an end
        return keep_alive and whole

    def _on_answered(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._task = None
        _LOG.error("a request failed in the front door", exc_info=error)
        self._refuse(Refused(500, errors.TritonUnknownError("the front door failed")))

    def _done(self, keep_alive: bool, body_bytes: int) -> None:
        self._task = None
        self._held_bytes -= body_bytes
        self._connections.give_bytes(body_bytes)
        if not keep_alive:
            self.close()
        elif not self._transport.is_closing():
            if not self._half_closed:
                self._transport.resume_reading()
            self._next()

    def _refuse(self, refused: Refused) -> None:
        """Answer what cannot be taken, and close; what the client still sends is passed over."""
        if not self._transport.is_closing():
            refused.log(self._parser.path)
            answer = self._gate.refusal(refused.status, refused.error, self._parser.path)
            self._transport.write(answer.encoded(keep_alive=False))
            self._lingering = True
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
            self._wait(_LINGER_S, self._transport.abort)

    def _too_slow(self) -> None:
        rule = f"the request took longer than {self._limits.arrival_s:g} s to arrive"
        self._refuse(Refused(408, errors.RequestTimeout(f"{rule} (REQUEST_TIMEOUT)")))

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(seconds, then)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
