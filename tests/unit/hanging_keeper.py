"""Engine keeper that hangs, asleep, from SIGUSR1 on."""

import signal
import time

from cog_triton.keeper import keeper_process

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
keeper_process.main()
