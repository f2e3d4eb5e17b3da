"""Engine keeper that outlives its server, and keeps the engine for the next one.

Run as ``python -m cog_triton.keeper.lot_keeper NAME DIRECTORY STARTER`` by `parking_lot`. One
server has it at a time. When that hangs up, an engine stays if it was asked for (`Keep`), or if
the server had not used it; else all ends, for what is in the engine of a server that crashed is
not known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cog_triton.keeper.keeper_messages import EngineEvent
from cog_triton.keeper.keeper_process import EngineKeeper
from cog_triton.keeper.kept_engine import EngineState, KeptEngine
from cog_triton.keeper.lot_messages import Adopt, Adopted, Describe, Description, End, Keep
from cog_triton.keeper.parked_record import remove_record, write_record
from cog_triton.keeper.sleep_messages import is_parkable
from cog_triton.system import log_format, message_stream
from cog_triton.system.free_memory import resident_bytes

_log = logging.getLogger("cog_triton.keeper.lot_keeper")  # it is run as __main__


class LotKeeper(EngineKeeper):
    """Keeper of engines for one server after the other; ends once it has neither."""

    def __init__(self, name: str, directory: Path, starter: int) -> None:
        """`starter` is the process that started it: it waits for a server as long as that runs."""
        super().__init__(name, directory)
        self._parks = True
        self._stop = asyncio.Event()
        self._adopted: Adopt | None = None
        self._last: Adopt | None = None
        self._parking = False
        self._keep = False
        self._used = False
        self._had_engine = False
        self._since = 0.0
        self._note = ""
        self._first_starter = starter
        self._starter: int | None = None

    async def run(self) -> None:
        """Serve until there is nothing left to keep, or SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        self._follow(self._first_starter)
        self._end_if_empty()
        try:
            await self.serve(self._stop)
        finally:
            remove_record(self._directory)

    def _follow(self, starter: int) -> None:
        """Have the process `starter` be the one to wait for a server, or to ask what was kept."""
        self._forget_starter()
        with suppress(ProcessLookupError):
            self._starter = os.pidfd_open(starter)
            asyncio.get_running_loop().add_reader(self._starter, self._starter_ended)

    def _forget_starter(self) -> None:
        if self._starter is not None:
            asyncio.get_running_loop().remove_reader(self._starter)
            os.close(self._starter)
            self._starter = None

    def _starter_ended(self) -> None:
        self._forget_starter()
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        """End, unless a server has this keeper, an engine is kept, or a server may yet come."""
        waits = self._starter is not None and (self._last is None or bool(self._note))
        if not (waits or self._adopted or self._parking or self._pool.unused):
            self._stop.set()

    def _tell(self, event: EngineEvent) -> None:
        super()._tell(event)
        self._end_if_empty()

    async def _publish(self, place: tuple[int, int], engine: KeptEngine) -> None:
        self._used = True
        await super()._publish(place, engine)

    async def _serve_other(
        self, message: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if isinstance(message, Adopt):
            refused = self._refusal(message)
            if refused:
                message_stream.send(writer, Adopted(os.getppid(), refused))
                return
            self._take(message)
            message_stream.send(writer, Adopted(os.getppid()))
            try:
                await self._serve_watcher(reader, writer)
            finally:
                await self._leave()
        elif isinstance(message, Describe | Keep):
            if isinstance(message, Keep) and self._last is not None:
                self._keep = True
                self._follow(message.asker)
            message_stream.send(writer, self._description())
        elif isinstance(message, End) and self._adopted is None:
            self._stop.set()

    def _refusal(self, adopt: Adopt) -> str:
        """Why a server does not get this keeper, else blank."""
        if self._adopted is not None:
            return "another server has it"
        if self._parking:
            return "it is being parked"
        if self._stop.is_set():
            return "it ends"
        return ""

    def _take(self, adopt: Adopt) -> None:
        self._adopted = self._last = adopt
        self._keep = self._used = False
        self._note = ""
        self._had_engine = self._pool.unused is not None
        self._pool.spare = adopt.spare
        # Engine processes, those that come later too, get what the server has, and no more.
        os.environ.clear()
        os.environ.update(adopt.environment)
        write_record(self._directory, adopt.identity)

    async def _leave(self) -> None:
        """Park what the server has left, or end."""
        self._adopted = None
        if self._keep or (self._had_engine and not self._used):
            self._parking = True
            self._note = await self._pool.keep_one()
            self._parking = False
            if self._used or not self._since:
                self._since = time.time()
        else:
            self._stop.set()
        self._end_if_empty()

    def _description(self) -> Description:
        adopt = self._last
        engine = self._pool.unused
        parked = engine and self._pool.parked(engine)
        if self._adopted is not None:
            state = "serving"
        elif self._parking:
            state = "parking"
        elif engine is None:
            state = "idle"
        elif engine.state is EngineState.READY:
            state = "loaded"
        else:
            state = "parked" if parked and parked.pids else "asleep"
        has_gpu = engine is not None and is_parkable(engine.spec)
        return Description(
            state=state,
            server=adopt.server if adopt else "",
            root=os.getppid(),
            model=adopt.model if adopt else "",
            pid=engine.pid if engine else None,
            since=self._since if engine and self._adopted is None else 0.0,
            host_bytes=resident_bytes(engine.root_pid) if engine else 0,
            gpus=(os.environ.get("CUDA_VISIBLE_DEVICES") or "all") if has_gpu else "",
            note=(parked.reason if parked else "") or self._note,
        )


async def _main(name: str, directory: Path, starter: int) -> None:
    await LotKeeper(name, directory, starter).run()


def main() -> None:
    """Run until nothing is left to keep."""
    name, directory, starter = sys.argv[1:]
    log_format.configure("console", os.environ.get("LOG_LEVEL", ""))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_main(name, Path(directory), int(starter)))


if __name__ == "__main__":
    main()
