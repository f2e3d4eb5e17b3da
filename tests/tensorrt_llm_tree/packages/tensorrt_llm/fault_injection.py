"""Fault injection for steps, in tests: TENSORRT_LLM_TREE="trtllm-build sleep 600".

``STEP sleep SECONDS`` and ``STEP exit CODE`` happen after the first of its files was written;
``STEP lose RANK`` leaves the file of a rank out and ends well.
"""

from __future__ import annotations

import os
import time

VARIABLE = "TENSORRT_LLM_TREE"
_injected: set[str] = set()


def between_files(step: str) -> None:
    """Inject a fault; called after each file."""
    fault, value = _of(step)
    if step in _injected or fault not in ("sleep", "exit"):
        return
    _injected.add(step)
    if fault == "sleep":
        print(f"{step} sleeps", flush=True)
        time.sleep(float(value))
    else:
        os._exit(int(value))  # as the kernel ends what needs too much memory: without a word


def loses(step: str, rank: int) -> bool:
    return _of(step) == ("lose", str(rank))


def _of(step: str) -> tuple[str, str]:
    name, _, rest = os.environ.get(VARIABLE, "").partition(" ")
    fault, _, value = rest.partition(" ")
    return (fault, value) if name == step else ("", "")
