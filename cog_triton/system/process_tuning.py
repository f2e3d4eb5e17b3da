"""Tuning of this process: GIL switch interval, garbage collection, glibc malloc, open files."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
import time

_SWITCH_INTERVAL_S = 0.05
_YOUNG_OBJECTS = 10_000
# Some programs, mpirun's among them, close every descriptor up to the limit one by one.
_ENOUGH_FILES = 65536
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ARENAS = 2
_THRESHOLD_BYTES = 1 << 20
_TRIM_PERIOD_S = 30.0

_libc = ctypes.CDLL(None)  # whose calls release the GIL


def tune_for_serving() -> None:
    """Set the GIL switch interval and freeze loaded objects; call it once all is loaded.

    A thread that waits for the GIL wakes up at each switch interval to request it. At the default
    of 5 ms, 256 threads that each wait to read their prompt do so 51 200 times a second. Here no
    thread computes for long between two calls that release the GIL anyway.

    Objects that exist now live as long as the process, so the collector need not scan them again.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def raise_open_files() -> int:
    """Raise the soft limit of open files, for future children, too; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _ENOUGH_FILES if soft == resource.RLIM_INFINITY else soft


def malloc_variables() -> dict[str, str]:
    """Environment variables with which another program has the settings of `limit_arenas`."""
    return {
        "MALLOC_ARENA_MAX": str(_ARENAS),
        "MALLOC_TRIM_THRESHOLD_": str(_THRESHOLD_BYTES),
        "MALLOC_MMAP_THRESHOLD_": str(_THRESHOLD_BYTES),
    }


def limit_arenas() -> None:
    """Use few malloc arenas, and fixed thresholds; call it before threads start.

    By default each thread gets an arena of its own, up to 8 a core, and the size from which blocks
    are mapped by themselves grows to 32 MB with the blocks that are freed. With a thread for each
    request, a few long prompts in turn leave their memory in every arena. No-op without glibc.
    """
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
