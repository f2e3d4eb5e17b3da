"""Messages between the server and its parent, which runs its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import CogTritonError
from cog_triton.ipc.messages import Message


class StartEngines(Message, frozen=True):
    """Have `count` engines listen at `address`, each with its number behind it, from now on.

    Each has its CUDA_VISIBLE_DEVICES of `gpus`, if there are any. With a `spare`, one more waits
    for their death. Engines of an equal order that run already stay.
    """

    spec: EngineSpec
    directory: str
    address: str
    environment: Mapping[str, str]
    count: int = 1
    gpus: Sequence[str] = ()
    spare: bool = False


class EndEngine(Message, frozen=True):
    """End an engine that serves, or all, for a fault."""

    reason: str
    replica: int | None = None


class StopEngines(Message, frozen=True):
    """End all engines; the answer, once none is left, is the same."""


class StartTriton(Message, frozen=True):
    """Start Triton's processes, with a log; answered by TritonChanged.

    `stop_signal` lets their requests end. Names in /dev/shm begin with `shm_prefix`. Stubs log
    requests in the form `request_log`, "off" for not at all.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    stop_signal: int
    shm_prefix: str
    log: str
    request_log: str


class StopTriton(Message, frozen=True):
    """Stop Triton, or kill it; answered by TritonChanged."""

    kills: bool


class StopCog(Message, frozen=True):
    """Stop Cog for good; the answer, once it has ended, is the same."""


class RestartCog(Message, frozen=True):
    """Cog has failed; one that was only `late` stays while it uses CPU."""

    reason: str
    late: bool


class Ready(Message, frozen=True):
    """Requests are served. A `message` for the user has a place for the `seconds` of the start."""

    message: str = ""


class NotReady(Message, frozen=True):
    """The start has failed, or all has: with `ends`, the server ends, and the rest is to."""

    error: CogTritonError
    ends: bool


class Running(Message, frozen=True):
    """To a server that begins: its run directory, and orders of an earlier server that stand.

    Triton's processes are below `triton_pid`.
    """

    run_dir: str
    engines: StartEngines | None = None
    triton: StartTriton | None = None
    triton_pid: int = 0


class EnginesChanged(Message, frozen=True):
    """Generations of the engines that serve, by replica; process ids of those, and of others."""

    serving: Mapping[int, int]
    pids: Sequence[int]
    others: Sequence[int]


class EngineDeath(Message, frozen=True):
    """The engine `replica` has died; `serving` is the number of engines that still serve.

    It served for `lasted` seconds. If that is None, it did not load, and no other is started.
    """

    reason: str
    replica: int
    serving: int
    lasted: float | None = None


class TritonChanged(Message, frozen=True):
    """Triton's processes are below `pid`, and are ended for a `reason`, if there is one.

    Without a `pid` they have ended, with a `code`, 128 and its number after a signal.
    """

    pid: int = 0
    code: int = 0
    reason: str = ""
