"""Memory limit of Triton: tells when tritonserver or a stub holds so much that a restart is due.

A stub cannot be replaced by itself: its death is tritonserver's. So all of Triton is restarted, as
planned, at a moment when that costs least.
"""

from __future__ import annotations

import asyncio
import logging
import time

from cog_triton.serving.admission import Admission
from cog_triton.triton import liveness

_log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_QUIET_WAIT_S = 300.0
_POLL_S = 0.1


class MemoryLimit:
    """Watch over the anonymous memory of each of Triton's processes, the engine's not included."""

    def __init__(self, mebibytes: int | None, admission: Admission) -> None:
        """Without `mebibytes` there is no limit."""
        self._limit = mebibytes
        self._admission = admission

    def disable(self) -> None:
        """No restart is due any more."""
        self._limit = None

    async def restart_due(self, root: int) -> str:
        """Wait until Triton, below the process `root`, exceeds the limit; describes the excess.

        It returns when nothing runs, or after five minutes if generations can go on afterwards,
        and has admission control hold all requests then. A limit that is exceeded from the start
        is ignored, with a warning.
        """
        if at_start := await self._excess(root):
            _log.warning("%s (TRITON_MEMORY_LIMIT) when just started; ignored", at_start)
            self.disable()
        while not (why := await self._excess(root)):
            await asyncio.sleep(_PERIOD_S)
        _log.warning("Triton: %s (TRITON_MEMORY_LIMIT); it is restarted when nothing runs", why)
        exceeded = time.monotonic()
        while self._limit is None or not self._admission.hold(
            interrupt=time.monotonic() - exceeded > _QUIET_WAIT_S
        ):
            await asyncio.sleep(_POLL_S)
        return why

    async def _excess(self, root: int) -> str:
        return await asyncio.to_thread(_excess, root, self._limit) if self._limit else ""


def _excess(root: int, limit: int) -> str:
    """Which process below `root` exceeds `limit`, in MiB, and by what; blank if none does."""
    for pid, name in liveness.named_processes(root).items():
        held = liveness.anonymous_bytes(pid) >> 20
        if held > limit:
            return f"{name} (process {pid}) holds {held} MiB, more than {limit}"
    return ""
