"""Report of a benchmark: tables of detail, and figures with their targets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parents[1] / ".work" / "bench"
_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the summary, and the most that it should be; the unit of a ratio is "x"."""

    name: str
    value: float
    unit: str = "x"
    target: float | None = None

    @property
    def verdict(self) -> str:
        """met or missed; empty without a target."""
        if self.target is None:
            return ""
        return "met" if self.value <= self.target else "missed"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: `rows` hold text that is ready to print."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add one row."""
        self.rows.append([number(cell) if isinstance(cell, float) else str(cell) for cell in cells])


@dataclass(slots=True)
class Report:
    """All results of one benchmark; `notes` say what the numbers include."""

    name: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print tables, notes and figures."""
        for grid in self.grids:
            show(grid)
        for note in dict.fromkeys(self.notes):
            print(f"- {note}")
        show(self.summary())

    def summary(self) -> Grid:
        """Table of all figures with their targets."""
        grid = Grid("", ("figure", "value", "target", ""))
        for figure in self.figures:
            target = "" if figure.target is None else f"<= {figure.target:g}"
            value = f"{number(figure.value)} {figure.unit}"
            grid.add(figure.name, value, target, figure.verdict)
        return grid

    def save(self, path: Path) -> None:
        """Write it as JSON, with the machine and the time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = [{**asdict(figure), "verdict": figure.verdict} for figure in self.figures]
        machine = {"machine": machine_name(), "load": os.getloadavg()[0], "at": time.time()}
        path.write_text(json.dumps({**asdict(self), "figures": figures, **machine}, indent=1))


def markdown_table(grid: Grid) -> str:
    """A table as it stands in a page; its first two columns are text."""
    rule = " | ".join(["---", "---", *["--:"] * (len(grid.columns) - 2)])
    lines = [" | ".join(grid.columns), rule, *(" | ".join(row) for row in grid.rows)]
    return "\n".join(f"| {line} |" for line in lines)


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Write between the marks of a page; raises ValueError without marks."""
    whole = page.read_text("utf-8")
    before, first, rest = whole.partition(marks[0])
    _, second, after = rest.partition(marks[1])
    if not second:
        raise ValueError(f"{page}: has no marks {marks[0].strip()} and {marks[1]}")
    page.write_text(f"{before}{first}{text}{second}{after}", "utf-8")


def machine_name() -> str:
    """Processor, cores and Python."""
    named = re.search(r"(?m)^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text())
    cores = len(os.sched_getaffinity(0))
    model = named[1] if named else platform.machine()
    return f"{model}, {cores} cores, Python {platform.python_version()}"


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show(grid: Grid) -> None:
    """Print one table, which is not folded when the output is a file."""
    table = Table(title=grid.title or None)
    for place, name in enumerate(grid.columns):
        table.add_column(name, justify="right" if place else "left")
    for row in grid.rows:
        table.add_row(*row, style="yellow" if row[-1] == "missed" else None)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def main(
    name: str,
    doc: str,
    measure: Callable[[argparse.Namespace], Report],
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> Report:
    """Command line of a benchmark: measure, print, and write .work/bench/NAME.json."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="output file")
    arguments(parser)
    args: Any = parser.parse_args()
    began = time.monotonic()
    report = measure(args)
    report.notes.append(f"{machine_name()}; took {time.monotonic() - began:.0f} s")
    if args.quick:
        report.notes.append("--quick: too short to tell anything")
    report.show()
    report.save(args.json)
    return report
