"""Rolling replacement: a new backend chain beside the old one, probed, switched to, drained."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cog_triton import errors
from cog_triton.artifact.engine_manifest import engine_bytes
from cog_triton.door.control import Command, Progress, Send
from cog_triton.door.upstream import ChainLauncher, Upstream, Upstreams, Variant
from cog_triton.serving.cog_health import still_starting
from cog_triton.settings import Settings
from cog_triton.system import reaper
from cog_triton.system.gpus import gpu_memory_use
from cog_triton.system.host_memory import host_memory, memory_of
from cog_triton.triton import server_sockets

_STILL_S = 10.0
_LOG = logging.getLogger(__name__)
Echo = Callable[[str], None]
_GIB = 1 << 30
_LEAST = 256 << 20  # Cog, Triton and their stubs, without an engine


class Rolling:
    """Rolls the door to other engines, one at a time; a failure before the switch changes nothing.

    After the switch nothing is undone: the new chain serves, whatever the old one does.
    """

    def __init__(
        self, settings: Settings, upstreams: Upstreams, launcher: ChainLauncher, *, watches: bool
    ) -> None:
        """`watches` says whether the door looks after the chain that serves."""
        self._settings = settings
        self._upstreams = upstreams
        self._launcher = launcher
        self._watches = watches
        self._label: str | None = None
        self._starting: asyncio.Task[Upstream] | None = None

    async def roll(self, command: Command, echo: Echo, left: asyncio.Event) -> str:
        """Replace the chain that serves; returns the last line for the user.

        `left` is set when whoever asked for it has gone; before the switch that undoes it.

        Raises:
            RollFailed: another roll is under way, memory is short, or `left` was set.
            CogTritonError: what the new chain's start failed with, its canary included.
        """
        if self._upstreams.swapping is not None:
            raise errors.RollFailed("a server of several models (--swap) is not rolled: restart it")
        if self._label is not None:
            raise errors.RollFailed(f"a roll to {self._label} is under way; try again after it")
        self._label = command.label
        try:
            old, began = self._upstreams.serving, time.monotonic()
            await asyncio.to_thread(require_memory, old, command, echo)
            self._starting = asyncio.ensure_future(self._started(command, echo))
            new = await self._unless(left, self._starting)
            self._switch(new)
            took = time.monotonic() - began
            echo(f"switched after {took:.1f} s: new requests go to {command.label}; draining")
            return await self._retire(old)
        finally:
            self._label = None

    async def handle(self, command: Command, send: Send, left: asyncio.Event) -> Progress:
        """Carry out a `command` of the control socket; the last answer to it, or a coded error."""
        if command.command == "roll":
            last = await self.roll(command, lambda line: send(Progress(say=line)), left)
            return Progress(say=last, done=True)
        chain = self._upstreams.serving.chain
        return Progress(
            say=f"{self._upstreams.serving.name} serves",
            done=True,
            work_dir=self._settings.work_dir.resolve(),
            mock=bool(chain and chain.environment.get("COG_TRITON_ENGINE")),
            drain_timeout=self._settings.drain_timeout,
        )

    def abandon(self) -> None:
        """Undo a roll that has not switched: the door is to drain."""
        if self._starting is not None:
            self._starting.cancel()

    async def _unless(self, left: asyncio.Event, starting: asyncio.Task[Upstream]) -> Upstream:
        """Result of `starting`, which ends when `left` is set, with all that it started."""
        leaving = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait([starting, leaving], return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled():
                return starting.result()
            raise errors.RollFailed("stopped before the switch; the old engine serves on")
        finally:
            leaving.cancel()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            self._starting = None

    async def _started(self, command: Command, echo: Echo) -> Upstream:
        """A new chain that is ready; one that does not become ready is gone again."""
        # The canary is part of its start: an engine that answers otherwise does not become ready.
        environment = {**command.environment, "CANARY": "require"}
        if not environment.get("SERVED_MODEL_NAME"):  # clients name it in every request
            environment["SERVED_MODEL_NAME"] = await self._upstreams.serving.model_name()
        variant = Variant(environment, command.python, command.directory)
        assert self._upstreams.serving.chain is not None
        its = self._upstreams.serving.chain.variant
        try:
            new = self._launcher.start(its.changed(variant))
        except OSError as error:
            raise errors.RollFailed(f"the new engine cannot be started: {error}") from error
        self._upstreams.add(new)
        new.follow()
        try:
            echo(f"starting {command.label} as {new.name}, beside {self._upstreams.serving.name}")
            await self._until_ready(new, echo)
        except BaseException:
            self._upstreams.remove(new)
            new.stop_watching()
            await asyncio.to_thread(new.close)
            raise
        return new

    async def _until_ready(self, new: Upstream, echo: Echo) -> None:
        began = said = time.monotonic()

        def waiting() -> None:
            nonlocal said
            if (now := time.monotonic()) - said >= _STILL_S:
                said = now
                echo(still_starting(self._settings, now - began))

        await new.until_ready(waiting)

    def _switch(self, new: Upstream) -> None:
        """Send every request that is decided on from now on to `new`."""
        old, self._upstreams.serving = self._upstreams.serving, new
        if self._watches:
            new.watch(self._settings)
        _LOG.info("new requests go to %s; %s drains", new.name, old.name)

    async def _retire(self, old: Upstream) -> str:
        """Drain `old`, and stop it; says how that ended."""
        assert old.chain is not None
        began = time.monotonic()
        try:
            port = self._settings.triton_grpc_port
            await asyncio.to_thread(server_sockets.withdraw, old.chain.reaper.process.pid, port)
        except OSError as error:
            _LOG.warning("%s takes gRPC connections until it has stopped: %s", old.name, error)
        running, died = old.connections.in_flight, old.exit_code() is not None
        await old.drain(self._settings.drain_timeout)
        old.stop_watching()
        self._upstreams.remove(old)
        took = time.monotonic() - began
        _LOG.info("%s has stopped", old.name)
        end = "had died" if died else f"drained ({running} requests) and stopped in {took:.1f} s"
        return f"{old.name} {end}"


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
