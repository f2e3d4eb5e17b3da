"""Results of checks, and their report: a terminal table, log lines, or JSON."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
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


_SYMBOLS = {
    State.OK: ("✓", "green"),
    State.WARN: ("!", "yellow"),
    State.FAIL: ("✗", "bold red"),
}


def healthy(checks: Sequence[Check]) -> bool:
    """Whether no check failed."""
    return all(check.state is not State.FAIL for check in checks)


def as_json(checks: Sequence[Check]) -> str:
    """JSON with `healthy`, and each check with its state and advice."""
    found = [
        {"name": c.name, "state": c.state.value, "found": c.found, "advice": c.advice}
        for c in checks
    ]
    return json.dumps({"healthy": healthy(checks), "checks": found}, indent=2)


def print_to(console: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check: folded in a terminal, whole and without colour in a log."""
    if console.is_terminal:
        console.print(_table(checks))
    else:
        for check in checks:
            advice = f"; to do: {check.advice}" if check.advice else ""
            line = f"{check.state.value:4}  {check.name}: {check.found}{advice}"
            console.print(_text(line), soft_wrap=True)
    console.print(_verdict(checks))


def _text(text: str) -> Text:
    """What is told of files and registries, which may hold what a terminal obeys."""
    return Text(printable(text, keep="\n"))


def _table(checks: Sequence[Check]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for check in checks:
        symbol, style = _SYMBOLS[check.state]
        told = _text(check.found)
        if check.advice:
            colour = "yellow" if style == "yellow" else "red"
            told.append(f"\n→ {printable(check.advice)}", style=colour)
        table.add_row(Text(symbol, style=style), check.name, told)
    return table


def _verdict(checks: Sequence[Check]) -> Text:
    missing = [check.name for check in checks if check.state is State.FAIL]
    if missing:
        return Text(f"Not ready to serve: see {', '.join(missing)}.", style="bold")
    warned = [check.name for check in checks if check.state is State.WARN]
    limits = f"; mind {', '.join(warned)}" if warned else ""
    return Text(f"Ready to serve{limits}.", style="bold")
