"""Report of an attack: its tables, in .work/attack and in the pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _report import Grid, markdown_table, write_between

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".work" / "attack"
PAGES = {
    "inputs": ROOT / "docs" / "security.md",
    "drains": ROOT / "docs" / "reliability.md",
}
"""Pages by phase."""


def marks(phase: str) -> tuple[str, str]:
    """What is before and after the table of a phase in its page."""
    return f"<!-- made by make attack: {phase} -->\n", f"<!-- end: {phase} -->"


def save(run: Mapping[str, Any], tables: Mapping[str, Grid]) -> None:
    """Write a run's tables, beside those of an earlier run of other phases on the same engine."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{run['engine']}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    new = {phase: {"run": run, **asdict(table)} for phase, table in tables.items()}
    path.write_text(json.dumps({**earlier, **new}, indent=1) + "\n")


def write() -> None:
    """Write the tables of all engines' reports into the pages."""
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    for phase, page in PAGES.items():
        found = [one[phase] for one in reports if phase in one]
        if not found:
            continue
        heads = [
            "- {engine}: {date}, commit {commit}, seed {seed}; {machine}; load {load:.0f};"
            " {seconds} s".format(**one["run"])
            for one in found
        ]
        table = Grid("", found[0]["columns"], [row for one in found for row in one["rows"]])
        text = "\n".join([*heads, "", markdown_table(table), ""])
        write_between(page, marks(phase), text)


def counts(found: Mapping[str, int]) -> str:
    """Counts by name, as a cell of a table."""
    return ", ".join(f"{count} x {name}" for name, count in sorted(found.items()))
