"""Control socket of the front door: lines of JSON, between processes of the same user.

A client sends one `Command`; the door answers with lines of `Progress`, the last of which is `done`
or an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cog_triton import errors
from cog_triton.ipc.framing import CONTROL_LIMIT, FrameError
from cog_triton.ipc.streams import LineStream, Server, receive_line
from cog_triton.system import local_socket
from cog_triton.system.printable import first_problem

_LOG = logging.getLogger(__name__)


def control_name(port: int) -> str:
    """Name of the control socket, for `local_socket`, of the door with Cog's public `port`."""
    return f"cog-triton-door-{port}"


class Command(BaseModel):
    """What is asked of the door: its `status`, or to `roll` to another engine.

    Attributes:
        label: of the new engine, for messages.
        environment: variables that say which engine it is, and how it is served.
        python: interpreter of another version of the package.
        directory: Cog project of that interpreter, or of an engine of another kind.
        engine_bytes: size of the engine's files, where known.
        force: whether to go on where memory for both is not there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Literal["status", "roll"]
    label: str = ""
    environment: dict[str, str] = {}
    python: Path | None = None
    directory: Path | None = None
    engine_bytes: int | None = None
    force: bool = False


class Progress(BaseModel):
    """A line of the answer: `say` is for the user, `error` the coded text it ended with.

    `work_dir`, `mock` and `drain_timeout` answer `status`: where the server keeps its files,
    whether it serves the mock, and DRAIN_TIMEOUT.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    say: str = ""
    error: str = ""
    done: bool = False
    work_dir: Path | None = None
    mock: bool = False
    drain_timeout: float = 0.0


def ask(port: int, command: Command) -> Iterator[Progress]:
    """Send `command` to the door with Cog's public `port`; yields its answers until it is done.

    Closing the iterator before that closes the connection, which undoes a roll before its switch.

    Raises:
        RollFailed: no door of our own user has that port, or it ended.
        CogTritonError: what the command failed with.
    """
    try:
        own = local_socket.connect(control_name(port))
    except OSError as error:
        raise errors.RollFailed(
            f"no server of `cog-triton serve` or an image on port {port}:"
            f" {error.strerror or error}: it must run here, as the same user, in the same container"
        ) from error
    with own:
        own.sendall(command.model_dump_json().encode() + b"\n")
        while True:
            try:
                answer = Progress.model_validate_json(receive_line(own, CONTROL_LIMIT))
            except (EOFError, ConnectionError) as error:
                raise errors.RollFailed(f"the server on port {port} ended") from error
            if answer.error:
                raise errors.from_text(answer.error) or errors.RollFailed(answer.error)
            yield answer
            if answer.done:
                return


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
            problem = f"{first_problem(error)}: not of this version"
            send(Progress(error=str(errors.RollFailed(problem))))


async def _notice_end(stream: LineStream, left: asyncio.Event) -> None:
    with suppress(EOFError, FrameError):
        while True:
            await stream.receive()
    left.set()
