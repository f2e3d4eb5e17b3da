"""Control socket of the front door: takes commands of our own user, one a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pydantic import ValidationError

from cog_triton import errors
from cog_triton.door.control_messages import Command, Progress, control_name
from cog_triton.ipc.framing import FrameError
from cog_triton.ipc.streams import LineStream, Server

_LOG = logging.getLogger(__name__)

Send = Callable[[Progress], None]
Handler = Callable[[Command, Send, asyncio.Event], Awaitable[Progress]]
"""Carries out a command; gets what sends progress, and an event: the client has left."""


class ControlSocket:
    """Listens on the name of the door's public `port`; `handle` carries out commands."""

    def __init__(self, port: int, handle: Handler) -> None:
        self._handle = handle
        self._server: Server | None = None
        try:
            self._server = Server(control_name(port), self._serve, LineStream)
        except OSError as error:
            _LOG.warning("no control socket, so `cog-triton roll` is off: %s", error)

    async def close(self) -> None:
        """Listen no more, and end what is under way."""
        if self._server is not None:
            self._server.close()
            await self._server.stop()

    async def _serve(self, stream: LineStream) -> None:
        left = asyncio.Event()

        def send(answer: Progress) -> None:
            if not left.is_set():
                stream.send(answer.model_dump_json(exclude_defaults=True).encode())

        try:
            command = Command.model_validate_json(await stream.receive())
            noticing = asyncio.ensure_future(_notice_end(stream, left))
            try:
                send(await self._handle(command, send, left))
            finally:
                noticing.cancel()
        except errors.CogTritonError as error:
            send(Progress(error=str(error)))
        except ValidationError as error:
            rule = error.errors(include_url=False)[0]
            problem = f"{'.'.join(map(str, rule['loc']))}: {rule['msg']}: not of this version"
            send(Progress(error=str(errors.RollFailed(problem))))


async def _notice_end(stream: LineStream, left: asyncio.Event) -> None:
    with suppress(EOFError, FrameError):
        while True:
            await stream.receive()
    left.set()
