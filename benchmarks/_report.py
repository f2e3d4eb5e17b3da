"""Report of a benchmark: tables of detail, and figures with their targets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parents[1] / ".work" / "bench"
_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Target:
    """A figure's target: at least `value`, or at most."""

    value: float
    least: bool = False

    def met_by(self, figure: float) -> bool:
        """Whether `figure` meets it."""
        return figure >= self.value if self.least else figure <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the summary, with its target; the unit of a ratio is "x"."""

    name: str
    value: float
    unit: str = "x"
    target: Target | None = None

    @property
    def verdict(self) -> str:
        """met or missed; empty without a target."""
        if self.target is None:
            return ""
        return "met" if self.target.met_by(self.value) else "missed"


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

    def show(self, console: Console) -> None:
        """Print tables, figures and notes."""
        for grid in self.grids:
            console.print(_table(grid))
        for note in dict.fromkeys(self.notes):
            console.print(f"- {note}", highlight=False)
        console.print(_table(summary({self.name: self.figures})))

    def save(self, path: Path) -> None:
        """Write it as JSON, with the machine and the time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = [{**asdict(figure), "verdict": figure.verdict} for figure in self.figures]
        machine = {"machine": machine_name(), "load": os.getloadavg()[0], "at": time.time()}
        path.write_text(json.dumps({**asdict(self), "figures": figures, **machine}, indent=1))


def summary(figures: dict[str, list[Figure]]) -> Grid:
    """Summary table: all figures with their targets."""
    grid = Grid("", ("benchmark", "figure", "value", "target", ""))
    for name, found in figures.items():
        for figure in found:
            value = f"{number(figure.value)} {figure.unit}"
            grid.add(name, figure.name, value, figure.target or "", figure.verdict)
    return grid


def as_data(one: Any) -> dict[str, Any]:
    """Fields of a dataclass, for JSON; `asdict` would count the items of a Counter anew."""
    return {field.name: getattr(one, field.name) for field in fields(one)}


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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0))
    model = next(named, platform.machine())
    return f"{model}, {cores} cores, Python {platform.python_version()}"


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def console() -> Console:
    """A console that does not fold tables when its output is a file."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def show(grid: Grid) -> None:
    """Print one table."""
    console().print(_table(grid))


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
    report.show(console())
    report.save(args.json)
    return report


def _table(grid: Grid) -> Table:
    table = Table(title=grid.title or None)
    for place, name in enumerate(grid.columns):
        left = grid.columns[0] == "benchmark" and place < 2
        table.add_column(name, justify="left" if left or not place else "right")
    for row in grid.rows:
        style = {"missed": "yellow"}.get(row[-1])
        table.add_row(*row, style=style)
    return table
