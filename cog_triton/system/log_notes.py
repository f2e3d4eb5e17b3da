"""Log notes about what clients send: each once a process, and no more than a log can bear."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cog_triton.errors import nearest

MAX_UNKNOWN = 20
_MAX_NOTES = 200
_SHOWN = 80
_noted: set[str] = set()


def log_once(log: logging.Logger, note: str) -> None:
    """Log a note as a warning, unless it was; after 200 notes, of which clients choose, no more."""
    if note not in _noted and len(_noted) < _MAX_NOTES:
        _noted.add(note)
        log.warning("%s", note)


class UnknownNames:
    """Unknown names of one request: the first 20 are compared with what is known, and noted."""

    def __init__(self, log: logging.Logger, what: str, known: Sequence[str]) -> None:
        """`what` is what they name in the log, such as ``request field``."""
        self._log, self._what, self._known = log, what, known
        self._seen: set[str] = set()

    def hint(self, name: str) -> str:
        """See `nearest`; a name that is near nothing is noted, as one that has no effect."""
        if name in self._seen:
            return ""
        if len(self._seen) == MAX_UNKNOWN:
            note = f"{self._what}: more than {MAX_UNKNOWN} names are unknown, and ignored"
            log_once(self._log, note)
            return ""
        self._seen.add(name)
        hint = nearest(name, self._known)
        if not hint:
            log_once(self._log, f"{self._what} {name[:_SHOWN]!r} is unknown, and ignored")
        return hint
