"""Control socket of the front door: takes commands of our own user, one a connection."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pydantic import ValidationError

from cog_triton import errors
from cog_triton.door.control_messages import MAX_LINE, Command, Progress, control_name
from cog_triton.system import local_socket

_LOG = logging.getLogger(__name__)

Send = Callable[[Progress], None]
Handler = Callable[[Command, Send, asyncio.Event], Awaitable[Progress]]
"""Carries out a command; gets what sends progress, and an event: the client has left."""


class ControlSocket:
    """Listens on the name of the door's public `port`; `handle` carries out commands."""

    def __init__(self, port: int, handle: Handler) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listening: socket.socket | None = None
        try:
            self._listening = local_socket.listen(control_name(port))
        except OSError as error:
            _LOG.warning("no control socket, so `cog-triton roll` is off: %s", error)
        else:
            self._loop.add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Listen no more, and end what is under way."""
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        assert self._listening is not None
        if (accepted := local_socket.accept(self._listening)) is None:
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._serve(accepted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted, limit=MAX_LINE)
        left = asyncio.Event()

        def send(answer: Progress) -> None:
            if not left.is_set():
                writer.write(answer.model_dump_json(exclude_defaults=True).encode() + b"\n")

        try:
            command = Command.model_validate_json(await reader.readuntil(b"\n"))
            noticing = asyncio.ensure_future(_notice_end(reader, left))
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
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()


async def _notice_end(reader: asyncio.StreamReader, left: asyncio.Event) -> None:
    with suppress(ConnectionError):
        while await reader.read(1024):
            pass
    left.set()
