"""GIL switch interval and GC tuning of serving processes."""

from __future__ import annotations

import subprocess
import sys

SEEN = """
import gc, sys
from cog_triton.system import process_tuning
loaded = [[] for _ in range(1000)]
process_tuning.tune_for_serving()
assert gc.get_freeze_count() > 1000
assert not any(item is kept for kept in gc.get_objects() for item in loaded[:1])
print(sys.getswitchinterval())
"""


def test_tuning_freezes_loaded_objects_and_lengthens_the_switch_interval() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.02
