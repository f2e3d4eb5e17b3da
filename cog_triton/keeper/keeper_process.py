"""Program of the engine keeper: ``python -m cog_triton.keeper.keeper_process NAME DIRECTORY``.

It listens on the socket NAME, in Linux's abstract namespace, for stubs that want an engine, for its
engine processes, and for the supervisor; files go to DIRECTORY. With a third argument, "spare", it
keeps another engine ready; each argument "gpus=0,1" is an engine's share of the GPUs, where there
are several. SIGTERM ends it, and its engines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cog_triton.ipc.streams import Server, Stream
from cog_triton.keeper.engine_pool import EngineNotLoaded, EnginePool
from cog_triton.keeper.keeper_messages import (
    GPUS,
    HEARTBEAT_S,
    Attach,
    EngineEvent,
    EngineLeased,
    EngineSpec,
    KillLeased,
    Leased,
    LeaseRefused,
    LeaseRequest,
    Locate,
    Release,
    Watch,
)
from cog_triton.keeper.kept_engine import EngineState, KeptEngine
from cog_triton.system import log_format

_log = logging.getLogger("cog_triton.keeper.keeper_process")  # it is run as __main__
_LOCATE_S = 0.5
_DEATH_S = 1.0


class EngineKeeper:
    """Keeper of engine processes: serves every connection to its socket."""

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        spare: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        """`name` is its socket; logs of engines go to `directory`; with a `spare` beside them.

        `gpus` are shares of them, one for each engine; without any, all engines see all GPUs.
        """
        self._name = name
        self._directory = directory
        self._numbers = itertools.count(1)
        self._pool = EnginePool(self._start_engine, self._tell, spare=spare)
        self._parks = spare
        self._gpus = gpus
        self._supervisor: Stream | None = None
        self._leases: dict[tuple[int, int], KeptEngine] = {}
        self._leased = asyncio.Condition()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; then end all engines."""
        server = Server(self._name, self._serve_peer)
        await stop.wait()
        server.close()
        await self._pool.close()
        await server.stop()

    def _start_engine(self, spec: EngineSpec) -> KeptEngine:
        number = next(self._numbers)
        gpus = self._pool.free_gpus(self._gpus)
        where = "" if gpus is None else f" on GPU {gpus}"
        _log.info("engine process %d starts%s: %s", number, where, spec.engine)
        return KeptEngine(number, spec, self._name, self._directory, gpus)

    def _tell(self, event: EngineEvent) -> None:
        if self._supervisor is not None:
            self._supervisor.send(event)
            self._supervisor.send(self._pool.kept())

    async def _serve_peer(self, stream: Stream) -> None:
        message = await stream.receive()
        if isinstance(message, Attach):
            engine = self._pool.engine(message.number)
            if engine is not None:
                await engine.attached(message.pid, stream)
        elif isinstance(message, LeaseRequest):
            await self._serve_lease(message, stream)
        elif isinstance(message, Locate):
            await self._locate(message, stream)
        elif isinstance(message, Watch):
            await self._serve_supervisor(message, stream)

    async def _serve_lease(self, request: LeaseRequest, stream: Stream) -> None:
        """Lease engines to one stub, one after the other, until it says `Release` or hangs up."""
        owner, place = request.owner, (request.owner, request.replica)
        # By descriptor: a process that is gone may have its number taken by another.
        descriptor = os.pidfd_open(owner) if owner else None
        engine = None
        try:
            message: LeaseRequest | Release = request
            while isinstance(message, LeaseRequest):
                if engine is not None:
                    await engine.end(_DEATH_S, "the connection to the engine's process has ended")
                following = asyncio.ensure_future(stream.receive())
                try:
                    engine = await self._lease(message.spec, following)
                    if engine is not None:
                        await self._publish(place, engine)
                        stream.send(Leased(engine.address))
                        self._tell(EngineLeased())
                    message = await following
                except EngineNotLoaded as error:
                    stream.send(LeaseRefused(error.error))
                    return
                finally:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
        except EOFError:
            # Requests in the stub would wait forever, and Triton does not notice its death.
            if descriptor is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            if descriptor is not None:
                os.close(descriptor)
            if engine is not None:
                if self._leases.get(place) is engine:
                    del self._leases[place]
                self._pool.release(engine)

    async def _lease(self, spec: EngineSpec, following: asyncio.Future[Any]) -> KeptEngine | None:
        """Lease an engine; None if `following`, the stub's next message or its end, comes first."""
        leasing = asyncio.ensure_future(self._pool.lease(self._asked(spec)))
        await asyncio.wait({leasing, following}, return_when=asyncio.FIRST_COMPLETED)
        if leasing.done():
            return leasing.result()
        leasing.cancel()
        return None

    def _asked(self, spec: EngineSpec) -> EngineSpec:
        return spec.parkable() if self._parks else spec

    async def _publish(self, place: tuple[int, int], engine: KeptEngine) -> None:
        _log.info("engine process %d is leased", engine.number)
        async with self._leased:
            self._leases[place] = engine
            _, engine.replica = place
            self._leased.notify_all()

    async def _locate(self, asked: Locate, stream: Stream) -> None:
        place = asked.owner, asked.replica

        def is_leased() -> bool:
            engine = self._leases.get(place)
            return engine is not None and engine.state is EngineState.LEASED

        async with self._leased:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._leased.wait_for(is_leased), _LOCATE_S)
        address = self._leases[place].address if is_leased() else None
        stream.send(Leased(address))

    async def _serve_supervisor(self, watch: Watch, stream: Stream) -> None:
        self._supervisor = stream
        if watch.ahead is not None:
            await self._pool.begin_ahead(self._asked(watch.ahead))
        beating = asyncio.ensure_future(self._beat(stream))
        try:
            while True:
                message = await stream.receive()
                if isinstance(message, KillLeased):
                    self._pool.kill_leased(message.reason, message.replica)
        finally:
            beating.cancel()
            if self._supervisor is stream:
                self._supervisor = None

    async def _beat(self, stream: Stream) -> None:
        """Tell again and again what is known, as a sign of life."""
        while True:
            stream.send(self._pool.kept())
            await asyncio.sleep(HEARTBEAT_S)


async def _main(name: str, directory: Path, *, spare: bool, gpus: Sequence[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await EngineKeeper(name, directory, spare=spare, gpus=gpus).serve(stop)


def main() -> None:
    """Run until SIGTERM."""
    name, directory, *options = sys.argv[1:]
    log_format.configure("console", os.environ.get("LOG_LEVEL", ""))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    gpus = [option.removeprefix(GPUS) for option in options if option.startswith(GPUS)]
    asyncio.run(_main(name, Path(directory), spare="spare" in options, gpus=gpus))


if __name__ == "__main__":
    main()
