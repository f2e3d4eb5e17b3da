"""The worker process of Cog dies with its server, and takes it down when it cannot serve."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

_LAST_WORDS_S = 2.0


def exit_with_parent() -> None:
    """End this process as soon as its parent has died.

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


def end_parent() -> None:
    """End the parent, so that the whole server exits non-zero and its platform starts it anew.

    Requests that have just been ended get their answers before. A parent that is PID 1 of its
    container can only be asked to stop, and exits with 0: signals that end a process without
    asking it do not reach it.
    """
    parent = os.getppid()
    time.sleep(_LAST_WORDS_S)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGTERM if parent == 1 else signal.SIGKILL)
