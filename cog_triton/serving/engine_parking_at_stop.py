"""Parking of the engine when ``cog-triton serve`` is stopped, so that the next start has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from cog_triton.keeper.lot_messages import Description
from cog_triton.keeper.parking_lot import LotEntry, ParkingLot
from cog_triton.settings import Settings
from cog_triton.system.detached import DetachedProgram

_POLL_S = 0.1
_END_S = 15.0
_PARK_S = 240.0
_KEPT = {
    "parked": "off the GPU",
    "asleep": "asleep, with some of the GPU's memory",
    "loaded": "in host memory",
}


class EngineParkingAtStop:
    """The server's place in its parking lot, from its start until its engine is parked or gone.

    Without PARK_ENGINE it does nothing. It must be made above every reaper of the server.
    """

    def __init__(self, settings: Settings) -> None:
        """Start a keeper that can outlive this process; raises E2106 if it does not start."""
        self._lot = ParkingLot(settings.work_dir)
        self.name = self._lot.open() if settings.park_engine else None
        """The server's name in the lot (COG_TRITON_PARKING); None without."""
        self._keeps = False

    @property
    def variables(self) -> dict[str, str]:
        """Environment of the server's processes."""
        return {"PARK_ENGINE": "1", "COG_TRITON_PARKING": self.name} if self.name else {}

    def keep(self) -> None:
        """Have the engine parked, once the server has let it go: the server is being stopped."""
        self._keeps = True
        for entry in self._entries():
            self._lot.keep(entry.name)

    def finish(self, echo: Callable[[str], None], hurried: Callable[[], bool]) -> None:
        """Wait until the engine is parked or gone, and say which.

        `hurried` tells whether the user asked to stop at once; then nothing is parked.
        """
        said = False
        began = self._entries()
        deadline = time.monotonic() + (_PARK_S if self._keeps else _END_S)
        while (states := self._states()) and not hurried() and time.monotonic() < deadline:
            if not {"serving", "parking"} & set(states.values()):
                break
            if not said and self._keeps and "parking" in states.values():
                said = True
                echo("Parking the engine; once more ends it instead")
            time.sleep(_POLL_S)
        for entry in began:
            assert entry.description is not None
            now = self._lot.describe(entry.name)
            if now is not None and now.state in _KEPT and not hurried():
                echo(kept_line(entry.name, now))
                continue
            if self._keeps and now is not None and now.note:
                echo(f"The engine is not parked: {now.note}")
            with suppress(OSError):
                self._end(DetachedProgram(entry.description.root))

    def _end(self, program: DetachedProgram) -> None:
        program.terminate()
        if not program.wait(_END_S):
            program.kill()
        program.close()

    def _states(self) -> dict[str, str]:
        return {one.name: one.description.state for one in self._entries() if one.description}

    def _entries(self) -> list[LotEntry]:
        return self._lot.of_server(self.name) if self.name else []


def kept_line(name: str, kept: Description) -> str:
    """What is said of an engine that is kept."""
    where = f"{_KEPT[kept.state]} as {name}, with {kept.host_memory} of host memory"
    return (
        f"The engine stays {where}, for the next start with --park; `cog-triton park drop` ends it"
    )
