"""Graceful drain: detects that the server was told to stop, so that running requests can finish.

Cog does not tell its predictor of a SIGTERM or a POST /shutdown: it stops listening, waits for
running requests without a limit, and exits. The front door announces the stop beforehand by
creating the file that COG_TRITON_DRAIN_FILE names, and waits until it is removed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cog_triton.system.tcp_sockets import listening_sockets

_POLL_S = 0.2


def start(port: int, file: Path | None, drain: Callable[[float | None], None]) -> None:
    """Watch on a thread; call `drain` once `file` exists or `port` is no longer listened on.

    `drain` gets the limit in seconds that `file` asks for, if it does. `file` is removed when that
    returns. A port that is not listened on yet is waited for.
    """

    def watch() -> None:
        listened = False
        while not (file and file.exists()):
            try:
                listens = any(listening_sockets(port))
            except OSError:  # no file descriptor is left to look with
                listens = listened
            if listened and not listens:
                break
            listened = listens
            time.sleep(_POLL_S)
        drain(_requested_limit(file) if file else None)
        if file is not None:
            file.unlink(missing_ok=True)

    threading.Thread(target=watch, name="drain-watch", daemon=True).start()


def request_drain(file: Path, seconds: float) -> None:
    """Make `file`, with the limit for running requests.

    Raises OSError where it cannot be made, as on a disk without space.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    try:
        fresh.write_text(f"{seconds:.3f}", "utf-8")
        fresh.replace(file)  # whole, for it is read as soon as it is there
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _requested_limit(file: Path) -> float | None:
    """The limit that `file` asks for, in seconds; None for DRAIN_TIMEOUT."""
    with suppress(OSError, ValueError):
        return max(0.0, float(file.read_text("utf-8")))
    return None
