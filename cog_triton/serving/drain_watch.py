"""Notices that the server was told to stop, so that what runs may end first.

Cog tells its predictor nothing of a SIGTERM or a POST /shutdown: it listens no more, waits for
its running requests as long as they take, and then ends. ``cog-triton serve`` says it before,
with a file named by COG_TRITON_DRAIN_FILE, and waits until that is removed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.2
_LISTENING = b"0A"


def start(port: int, file: Path | None, drain: Callable[[], None]) -> None:
    """On a thread, call `drain` once when `file` exists or nothing listens on `port` any more.

    `file` is removed when `drain` returns. A port on which nobody listens yet is waited for.
    """

    def look() -> None:
        listened = False
        while not (file and file.exists()):
            listens = is_listening(port)
            if listened and not listens:
                break
            listened = listens
            time.sleep(_POLL_S)
        drain()
        if file is not None:
            file.unlink(missing_ok=True)

    threading.Thread(target=look, name="drain-watch", daemon=True).start()


def is_listening(port: int) -> bool:
    """Whether a TCP socket of this network namespace listens on `port`; see proc(5)."""
    ending = b":%04X" % port
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), Path(table).open("rb") as lines:
            next(lines)
            for line in lines:
                fields = line.split(maxsplit=4)
                if fields[3] != _LISTENING:
                    break  # those that listen come first, and of the others there may be thousands
                if fields[1].endswith(ending):
                    return True
    return False
