"""Client of the front door's control socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from cog_triton import errors
from cog_triton.door.control_messages import MAX_LINE, Command, Progress, control_name
from cog_triton.system import local_socket


def ask(port: int, command: Command) -> Iterator[Progress]:
    """Send `command` to the door with Cog's public `port`; yields its answers until it is done.

    Closing the iterator before that closes the connection, which undoes a roll before its switch.

    Raises:
        RollFailed: no door of our own user has that port, or it ended.
        CogTritonError: what the command failed with.
    """
    with _connected(port) as own, own.makefile("rwb") as stream:
        stream.write(command.model_dump_json().encode() + b"\n")
        stream.flush()
        while line := stream.readline(MAX_LINE):
            answer = Progress.model_validate_json(line)
            if answer.error:
                raise errors.from_text(answer.error) or errors.RollFailed(answer.error)
            yield answer
            if answer.done:
                return
    raise errors.RollFailed(f"the server on port {port} ended")


def _connected(port: int) -> socket.socket:
    try:
        return local_socket.connect(control_name(port))
    except OSError as error:
        raise errors.RollFailed(
            f"no server of `cog-triton serve` or an image on port {port}:"
            f" {error.strerror or error}: it must run here, as the same user, in the same container"
        ) from error
