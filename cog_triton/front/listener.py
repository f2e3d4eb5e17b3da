"""Accepts connections of a public port for a protocol of asyncio's, with TLS or without.

A certificate chain and its key are read again whenever they change.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import traceback
from asyncio import sslproto
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cog_triton import errors
from cog_triton.errors import InvalidArgument
from cog_triton.front.file_reader import FileReader

# Of a burst, the first are served while the rest wait to be accepted.
_AT_ONCE = 16
_RETRY_S = 0.5
_MOST_HANDSHAKES = 512
_HANDSHAKE_S = 10.0
_SHUTDOWN_S = 2.0
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG = logging.getLogger(__name__)
# asyncio gives each connection a buffer of 256 KiB; a record of TLS has at most 16 KiB and a head.
sslproto.SSLProtocol.max_size = 32 << 10


class Certificate(FileReader):
    """Server certificate; connections that are open keep the one that they have."""

    most_bytes = 1 << 20
    kept = "the certificate of before stays, as the new one is wrong"
    renewed = "a new certificate is in use"
    context: ssl.SSLContext
    """What new connections have."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises E1005 where the files are wrong."""
        self._files = (chain, key)
        super().__init__(f"TLS_CERT_FILE={chain}, TLS_KEY_FILE={key}")

    def files(self) -> Sequence[Path]:
        return self._files

    def take(self, data: object) -> None:
        """See `FileReader`; OpenSSL reads the files by itself."""
        chain, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(chain, key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise InvalidArgument(
                f"TLS_CERT_FILE={chain}, TLS_KEY_FILE={key}: must be a PEM chain and its key,"
                f" without a password: {getattr(error, 'reason', None) or error}"
            ) from None
        self.context = context


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
            secured["ssl_shutdown_timeout"] = _SHUTDOWN_S
        try:
            await self._loop.connect_accepted_socket(self._factory, accepted, **secured)
        except OSError as error:  # those of ssl, too
            traceback.clear_frames(error.__traceback__)  # they and buffers of TLS are a circle
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
