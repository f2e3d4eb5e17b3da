"""glibc malloc settings for processes that encode prompts: memory goes back when it is freed.

By default each thread gets an arena of its own, up to 8 a core, and the size from which blocks are
mapped by themselves grows to 32 MB with the blocks that are freed. With a thread for each request,
a few long prompts in turn leave their memory in every arena.
"""

from __future__ import annotations

import ctypes
import threading
import time

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ARENAS = 2
_THRESHOLD_BYTES = 1 << 20
_TRIM_PERIOD_S = 30.0

_libc = ctypes.CDLL(None)  # whose calls release the GIL


def variables() -> dict[str, str]:
    """Environment variables with which a program that is not Python has the same settings."""
    return {
        "MALLOC_ARENA_MAX": str(_ARENAS),
        "MALLOC_TRIM_THRESHOLD_": str(_THRESHOLD_BYTES),
        "MALLOC_MMAP_THRESHOLD_": str(_THRESHOLD_BYTES),
    }


def limit_arenas() -> None:
    """Use few arenas, and fixed thresholds; call it before threads start. No-op without glibc."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)
        _libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
        _libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)


def return_freed_memory() -> None:
    """Give free pages of all arenas back to the system; takes milliseconds. No-op without glibc."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def trim_periodically() -> None:
    """Start a daemon thread that gives free pages back every 30 s; takes a millisecond each time.

    Between long-lived blocks of many requests free pages stay scattered, which no threshold frees.
    """

    def trim() -> None:
        while True:
            time.sleep(_TRIM_PERIOD_S)
            return_freed_memory()

    threading.Thread(target=trim, name="malloc-trim", daemon=True).start()
