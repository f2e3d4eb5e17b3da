"""A process that serves leaves what it has loaded out of garbage collection, and switches less."""

from __future__ import annotations

import subprocess
import sys

SEEN = """
import gc, sys
from cog_triton.system import gc_tuning
loaded = [[] for _ in range(1000)]
gc_tuning.settle()
assert gc.get_freeze_count() > 1000
assert not any(item is kept for kept in gc.get_objects() for item in loaded[:1])
print(sys.getswitchinterval())
"""


def test_what_is_loaded_is_frozen_and_threads_wake_up_less() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.02
