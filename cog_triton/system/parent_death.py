"""Parent-death watch: Cog's worker exits with its server, and stops it when it cannot serve."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

_FLUSH_S = 2.0


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
