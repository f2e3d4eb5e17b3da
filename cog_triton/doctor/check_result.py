"""What one look at the machine brought."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(str, enum.Enum):
    """`FAIL`: serving will not work; `WARN`: it may, with limits."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was found, and what to do, empty if nothing."""

    name: str
    state: State
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, State.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    """It may do."""
    return Check(name, State.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    """It will not do."""
    return Check(name, State.FAIL, found, advice)
