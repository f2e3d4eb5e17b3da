"""Messages of a keeper that outlives servers: who adopts it, what it holds, when it ends.

Each is the first of a connection; an `Adopt` that is answered without `refused` goes on as a
`Watch` of `keeper_messages` does, and the server has the keeper for as long as it lasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Adopt:
    """From a server: be its keeper, for engines of this `identity`, with this environment.

    `server` is the server's name in the parking lot, `model` what people call the engine.
    """

    server: str
    model: str
    identity: Mapping[str, str]
    spare: bool
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Adopted:
    """To the server: it has the keeper, unless `refused` says why not; `root` is its root."""

    root: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Describe:
    """From anybody: what is here?"""


@dataclass(frozen=True, slots=True)
class Keep:
    """From a server that is being stopped: keep its engine, once it has hung up.

    As long as the process `asker` runs, the keeper can tell why nothing was kept.
    """

    asker: int


@dataclass(frozen=True, slots=True)
class End:
    """From anybody: end now, with all engines; refused while a server has the keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a keeper holds.

    Attributes:
        state: ``idle``, ``serving``, ``parking``, or how the engine is kept: ``parked`` (off the
            GPU), ``asleep`` (some GPU memory is left), ``loaded`` (in host memory, as it served).
        server: name of the server that has it, or had it last.
        model: what people call the engine.
        pid: process id of the engine.
        since: when it was parked, in seconds of time.time(); 0 where it is not.
        host_bytes: host memory that it holds.
        gpus: CUDA_VISIBLE_DEVICES of an engine that has a GPU to go back to.
        note: why it only sleeps, or why nothing was parked.
        root: process id of the keeper's root.
    """

    state: str
    server: str
    root: int
    model: str = ""
    pid: int | None = None
    since: float = 0.0
    host_bytes: int = 0
    gpus: str = ""
    note: str = ""

    @property
    def host_memory(self) -> str:
        """Host memory that it holds, in words; blank where it holds none."""
        if self.host_bytes < 1e9:
            return f"{self.host_bytes / 1e6:.0f} MB" if self.host_bytes else ""
        return f"{self.host_bytes / 1e9:.1f} GB"
