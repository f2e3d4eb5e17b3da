"""Log notes about what clients send: each once a process, and no more than a log can bear."""

from __future__ import annotations

import logging

_MAX_NOTES = 200
_noted: set[str] = set()


def log_once(log: logging.Logger, note: str) -> None:
    """Log a note as a warning, unless it was; after 200 notes, of which clients choose, no more."""
    if note not in _noted and len(_noted) < _MAX_NOTES:
        _noted.add(note)
        log.warning("%s", note)
