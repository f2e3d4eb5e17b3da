"""Memory check before a rolling replacement: whether two engines fit beside each other."""

from __future__ import annotations

from collections.abc import Callable

from cog_triton import errors
from cog_triton.artifact.engine_size import engine_bytes
from cog_triton.door.control_messages import Command
from cog_triton.door.upstream import Upstream
from cog_triton.system import reaper
from cog_triton.system.free_memory import free_memory, memory_of

_GIB = 1 << 30
_LEAST = 256 << 20  # Cog, Triton and their stubs, without an engine


def require_memory(old: Upstream, command: Command, echo: Callable[[str], None]) -> None:
    """Check host memory and GPU memory for a second chain beside `old`; blocks.

    The estimate for the host is what the old chain takes now, with the new engine's files in the
    place of its own: its KV cache and its front end are like the old one's.

    Raises:
        RollFailed: memory is short, and `force` is not set; has both figures.
    """
    assert old.chain is not None
    taken = memory_of({*reaper.descendants(old.chain.reaper.process.pid)})
    its = old.chain.environment
    before = engine_bytes(its.get("COG_WEIGHTS") or its.get("ENGINE_DIR", ""))
    after, needs = command.engine_bytes, taken
    if before is not None and after is not None:
        needs = max(taken - before + after, after + _LEAST)
    free = free_memory()
    echo(f"memory: the new engine needs about {needs / _GIB:.1f} GiB, {free / _GIB:.1f} are free")
    if needs > free and not command.force:
        raise errors.RollFailed(
            f"the new engine needs about {needs / _GIB:.1f} GiB beside the old one, which takes"
            f" {taken / _GIB:.1f}, and {free / _GIB:.1f} are free: give the machine or container"
            " more, stop the server and start it with the new engine, or try it with --force"
        )
