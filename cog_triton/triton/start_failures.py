"""Causes of a failed start that are this machine's, by the lines of Triton's log."""

from __future__ import annotations

_HINTS = {
    "Unable to initialize shared memory key": (
        "/dev/shm is too small, or full: each model needs at least 1 MB there, and what crosses"
        " between them; make it larger (docker run --shm-size=1g)"
    ),
    "Failed to create temporary directory for Python environments": (
        "/tmp cannot be written: Triton's Python backend needs it; mount a tmpfs there"
    ),
    "UnicodeEncodeError: 'ascii' codec": (
        "a path has characters beyond ASCII, which Triton's Python does not take here: set"
        " COG_TRITON_WORK_DIR and ENGINE_DIR to paths without them"
    ),
    "No space left on device": "a disk, or /dev/shm, is full: free some space",
    "Cannot allocate memory": "memory is short: give it more, or serve a smaller engine",
    "std::bad_alloc": "memory is short: give it more, or serve a smaller engine",
}


def hint(log: str) -> str:
    """What to do, with a colon, by the text of `log`; blank if nothing is known."""
    for sign, found in _HINTS.items():
        if sign in log:
            return f"{found}: "
    return ""
