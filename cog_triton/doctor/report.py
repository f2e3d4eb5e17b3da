"""Results of checks, and their report: lines or JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from cog_triton.system.printable import printable


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


_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


def healthy(checks: Sequence[Check]) -> bool:
    """Whether no check failed."""
    return all(check.state is not State.FAIL for check in checks)


def as_json(checks: Sequence[Check]) -> str:
    """JSON with `healthy`, and each check with its state and advice."""
    found = [dataclasses.asdict(check) for check in checks]
    return json.dumps({"healthy": healthy(checks), "checks": found}, indent=2)


def print_to(console: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check, without what a terminal obeys, and the verdict."""
    for check in checks:
        advice = f"; to do: {check.advice}" if check.advice else ""
        line = Text(f"{check.state.value:4}  ", style=_STYLES[check.state])
        line.append(printable(f"{check.name}: {check.found}{advice}", keep="\n"), style="none")
        console.print(line, soft_wrap=True)
    found = {state: [c.name for c in checks if c.state is state] for state in State}
    verdict = f"Not ready to serve: see {', '.join(found[State.FAIL])}."
    if healthy(checks):
        limits = f"; mind {', '.join(found[State.WARN])}" if found[State.WARN] else ""
        verdict = f"Ready to serve{limits}."
    console.print(Text(verdict, style="bold"))
