"""gRPC relay: TRITON_GRPC_PORT of 127.0.0.1, passed byte for byte to the Triton that runs.

Triton's gRPC asks for no key, and listens on a Unix socket of this user. `TritonServer` has no
relay while COG_TRITON_KEYS is set.
"""

from __future__ import annotations

import asyncio
import errno
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from pathlib import Path

from cog_triton.errors import TritonStartFailed

_NAME = "TRITON_GRPC_PORT"
_BACKLOG = 1024
_CHUNK = 1 << 16
_FLUSH_S = 1.0


class GrpcRelay:
    """One relay, on the event loop that `start` runs on; it outlives restarts of Triton."""

    def __init__(self, port: int, socket: Callable[[], Path]) -> None:
        """`socket` gives the Unix socket of the Triton that was started last."""
        self._port = port
        self._socket = socket
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, unless it does; raises E2106 if that cannot be."""
        if self._server is not None:
            return
        try:
            self._server = await asyncio.start_server(
                self._accept, "127.0.0.1", self._port, backlog=_BACKLOG
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "is in use by now" if taken else f"cannot listen: {error.strerror}"
            raise TritonStartFailed(
                f"{_NAME}={self._port} {reason}; choose another with {_NAME}=..."
            ) from error

    async def stop(self) -> None:
        """End it, after Triton's end; clients get the last bytes if they read them soon."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._connections:
            await asyncio.wait(self._connections, timeout=_FLUSH_S)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        connection = asyncio.ensure_future(self._relay(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _relay(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Pass bytes until Triton ends the connection, which it does when the client has."""
        try:
            from_triton, to_triton = await asyncio.open_unix_connection(self._socket())
        except OSError:  # Triton is restarted, or no descriptor is left
            writer.close()
            return
        upward = asyncio.ensure_future(_copy(reader, to_triton))
        try:
            await _copy(from_triton, writer)
        finally:
            upward.cancel()
            to_triton.close()
            writer.close()


async def _copy(source: StreamReader, sink: StreamWriter) -> None:
    """Pass bytes no faster than `sink` takes them, then the end; a broken connection breaks it."""
    sink.transport.set_write_buffer_limits(0)
    try:
        while data := await source.read(_CHUNK):
            sink.write(data)
            await sink.drain()
        sink.write_eof()
    except OSError:
        sink.transport.abort()
