"""What all tests need of the process that they run in."""

from __future__ import annotations

import signal

# What a shell starts in the background ignores Ctrl-C, and what nohup starts a hang-up; and so
# would all that tests start.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)
