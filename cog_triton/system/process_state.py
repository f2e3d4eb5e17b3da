"""State of processes by proc(5), and a watch of our parent's end."""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
import time
from pathlib import Path

UNKNOWN = "?"
_FLUSH_S = 2.0


def stat_fields(stat: Path) -> list[str]:
    """Fields of a process's or thread's stat file from the state on; empty if it is gone.

    Only UNKNOWN while this process has no file descriptor to read it with.
    """
    try:
        return stat.read_text("utf-8", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return [UNKNOWN]
        raise


def process_state(pid: int) -> str:
    """State letter, e.g. T for stopped; blank if there is no such process."""
    return (stat_fields(Path(f"/proc/{pid}/stat")) or [""])[0]


def exit_with_parent() -> None:
    """Exit this process as soon as its parent has died.

    PR_SET_PDEATHSIG would follow the parent's thread that spawned us, not the parent.
    """
    parent = os.getppid()
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def stop_parent() -> None:
    """Stop the parent, so that the server exits non-zero and its platform restarts it.

    Waits first, for requests that just failed to get their responses. A parent that is PID 1 of its
    container gets SIGTERM and exits with 0: SIGKILL does not reach it.
    """
    parent = os.getppid()
    time.sleep(_FLUSH_S)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGTERM if parent == 1 else signal.SIGKILL)
