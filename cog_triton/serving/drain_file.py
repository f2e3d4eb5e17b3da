"""Drain file: asks a worker to let its requests end, within so many seconds, and to tell when.

Cog does not tell its predictor of a stop. Whoever is above it makes this file; the worker
(`drain_watch`) removes it once no request is left.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def request_drain(file: Path, seconds: float | None = None) -> None:
    """Make `file`, with the limit for running requests; DRAIN_TIMEOUT without one.

    Raises OSError where it cannot be made, as on a disk without space.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    try:
        fresh.write_text("" if seconds is None else f"{seconds:.3f}", "utf-8")
        fresh.replace(file)  # whole, for it is read as soon as it is there
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def requested_limit(file: Path) -> float | None:
    """The limit that `file` asks for, in seconds; None for DRAIN_TIMEOUT."""
    with suppress(OSError, ValueError):
        return max(0.0, float(file.read_text("utf-8")))
    return None
