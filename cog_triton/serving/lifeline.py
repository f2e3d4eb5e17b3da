"""The worker process of Cog dies with its server, however the server dies."""

from __future__ import annotations

import os
import select
import threading


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
