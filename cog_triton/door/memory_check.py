"""Memory check before a rolling replacement: whether two engines fit beside each other."""

from __future__ import annotations

from collections.abc import Callable

from cog_triton import errors
from cog_triton.artifact.engine_size import engine_bytes
from cog_triton.door.control_messages import Command
from cog_triton.door.upstream import Upstream
from cog_triton.system import reaper
from cog_triton.system.gpu_memory_use import gpu_memory_use
from cog_triton.system.host_memory import host_memory, memory_of

_GIB = 1 << 30
_LEAST = 256 << 20  # Cog, Triton and their stubs, without an engine


def require_memory(old: Upstream, command: Command, echo: Callable[[str], None]) -> None:
    """Check host memory and GPU memory for a second chain beside `old`; blocks.

    The estimate is what the old chain takes now, with the new engine's files in the place of its
    own: its KV cache and its front end are like the old one's. Files are spread over the GPUs.

    Raises:
        RollFailed: memory is short, and `force` is not set; has both figures.
    """
    assert old.chain is not None
    pids = {*reaper.descendants(old.chain.reaper.process.pid)}
    its = old.chain.environment
    before = engine_bytes(its.get("COG_WEIGHTS") or its.get("ENGINE_DIR", ""))
    after = command.engine_bytes
    taken = memory_of(pids)
    needs = _needed(taken, before, after, _LEAST)
    _require("memory", needs, taken, host_memory().free, command, echo)
    gpus = gpu_memory_use(pids)
    for gpu in gpus:
        needs = _needed(gpu.taken, before, after, 0, shares=len(gpus))
        _require(f"memory of GPU {gpu.index}", needs, gpu.taken, gpu.free, command, echo)


def _needed(taken: int, before: int | None, after: int | None, least: int, shares: int = 1) -> int:
    """Bytes for an engine of `after` in the place of one of `before`, which hold `taken`.

    The files of both are in so many equal `shares`.
    """
    if before is None or after is None:
        return taken
    return max(taken + (after - before) // shares, after // shares + least)


def _require(
    what: str, needs: int, taken: int, free: int, command: Command, echo: Callable[[str], None]
) -> None:
    echo(f"{what}: the new engine needs about {needs / _GIB:.1f} GiB, {free / _GIB:.1f} are free")
    if needs > free and not command.force:
        raise errors.RollFailed(
            f"{what}: the new engine needs about {needs / _GIB:.1f} GiB beside the old one, which"
            f" takes {taken / _GIB:.1f}, and {free / _GIB:.1f} are free: give the machine or"
            " container more, stop the server and start it with the new engine, or try it with"
            " --force"
        )
