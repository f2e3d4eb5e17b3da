"""Result of one check: state, finding and advice."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.StrEnum):
    """State of a check. `FAIL`: serving will not work; `WARN`: it may, with limits."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check; `advice` says what to do, empty if nothing."""

    name: str
    state: State
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """Passed check."""
    return Check(name, State.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    """Check with a warning."""
    return Check(name, State.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    """Failed check."""
    return Check(name, State.FAIL, found, advice)
