"""Messages of the front door's control socket: a line of JSON each, of the same user.

A client sends one `Command`; the door answers with lines of `Progress`, the last of which is `done`
or an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

MAX_LINE = 1 << 20
"""Most bytes of a message."""


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
