"""Log notes about what clients send: each once a process, and no more than a log can bear."""

from __future__ import annotations

import logging
from collections.abc import Iterable

MAX_NOTES = 1024
_MOST_CHARACTERS = 96
_noted: set[str] = set()


def log_once(log: logging.Logger, note: str) -> None:
    """Log a note as a warning, once; no more than 1024 notes, which clients may choose."""
    if note not in _noted and len(_noted) < MAX_NOTES:
        _noted.add(note)
        log.warning("%s", note)


def note_unknown(log: logging.Logger, what: str, names: Iterable[str]) -> None:
    """Log each of a request's unknown names once; `what` they name, such as ``request field``."""
    for name in names:
        if len(_noted) == MAX_NOTES:
            return
        log_once(log, f"{what} {name[:_MOST_CHARACTERS]!r} is unknown, and ignored")
