"""Report of an attack: as data in .work/attack, as tables in the pages, and what failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _report import Grid, markdown_table, write_between
from _report import show as show_grid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".work" / "attack"
MARKS = {
    name: (f"<!-- made by make attack: {name} -->\n", f"<!-- end: {name} -->")
    for name in ("inputs", "drains", "tars")
}
PAGES = {
    "inputs": ROOT / "docs" / "security.md",
    "drains": ROOT / "docs" / "reliability.md",
    "tars": ROOT / "docs" / "security.md",
}
_Row = Mapping[str, Any]


def failures(report: _Row) -> list[str]:
    """What must not have happened, a line each."""
    found = []
    inputs = report.get("inputs", {})
    for kind, findings in inputs.get("found", {}).items():
        for what, examples in findings["problems"].items():
            found += [f"{kind}: {what}: {example}" for example in examples]
    if memory := inputs.get("memory"):
        before, after = (sum(memory[name].values()) for name in ("before", "after"))
        if after > before * inputs["growth"]:
            found.append(f"memory: {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after")
    for one in report.get("drains", ()):
        where = f"{one['sent']} to {one['way']}, {one['killed'] or 'none'} killed"
        found += [f"{where}: {problem}" for problem in one["problems"]]
    for one in report.get("tars", ()):
        found += [f"{one['name']}: {problem}" for problem in one["problems"]]
    return found


def save(report: _Row) -> None:
    """Write it, beside what an earlier run of other phases has told of the engine."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{report['engine']}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    head = {name: value for name, value in report.items() if name not in MARKS}
    for name in MARKS.keys() & report.keys():
        earlier[name] = {"run": head, "data": report[name]}
    path.write_text(json.dumps(earlier, indent=1) + "\n")


def show(report: _Row) -> None:
    """Print the tables of a run."""
    for name in MARKS:
        if name in report:
            show_grid(_table(name, [(report["engine"], report[name])]))


def write() -> None:
    """Write the tables of all engines' reports into the pages."""
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    for name, marks in MARKS.items():
        told = [one[name] for one in reports if name in one]
        if not told:
            continue
        rows = [(one["run"]["engine"], one["data"]) for one in told]
        heads = [
            "- {engine}: {date}, commit {commit}, seed {seed}; {machine}; load {load:.0f};"
            " {seconds} s".format(**one["run"])
            for one in told
        ]
        text = "\n".join([*heads, "", markdown_table(_table(name, rows)), ""])
        write_between(PAGES[name], marks, text)


def _table(name: str, rows: list[tuple[str, Any]]) -> Grid:
    made = {"inputs": _inputs, "drains": _drains, "tars": _tars}
    return made[name](rows)


def _inputs(rows: list[tuple[str, Any]]) -> Grid:
    columns = ("hostile inputs", "engine", "inputs", "answers", "died", "longest silence s",
               "most CPU s", "control answers", "broken rules")  # fmt: skip
    table = Grid("", columns)
    for engine, data in rows:
        table.add("none", engine, 0, "", "", round(data["undisturbed_s"], 2), "", "", "")
        for kind, one in data["found"].items():
            right = one["controls"].get("complete", 0) + one["controls"].get("other text", 0)
            table.add(
                *(kind, engine, one["inputs"], _counts(one["answers"]), sum(one["died"].values())),
                *(round(one["gap"], 2), round(one["cpu"], 1)),
                f"{right} of {sum(one['controls'].values())} right",
                "; ".join(sorted(one["problems"])) or "none",
            )
        if memory := data["memory"]:
            before, after = (sum(memory[name].values()) / 1e6 for name in ("before", "after"))
            table.add("memory, MB", engine, "", f"{before:.0f}, {after:.0f}", *[""] * 5)
    return table


def _drains(rows: list[tuple[str, Any]]) -> Grid:
    columns = ("stopped", "engine", "signal", "killed meanwhile", "streams", "newcomers",
               "webhooks", "ended after s", "longest silence s", "broken promises")  # fmt: skip
    table = Grid("", columns)
    for engine, data in rows:
        for one in data:
            streams = {f"{path} {name}": count
                       for path, ends in one["streams"].items()
                       for name, count in ends.items()}  # fmt: skip
            table.add(
                *(one["way"], engine, one["sent"], one["killed"] or "none", _counts(streams)),
                *(_counts(one["newcomers"]), _counts(one["webhooks"]), round(one["seconds"], 1)),
                *(round(one["gap"], 1), len(one["problems"]) or "none"),
            )
    return table


def _tars(rows: list[tuple[str, Any]]) -> Grid:
    columns = ("engine.tar with", "inspect", "build --add-seal", "serve", "s", "largest process MB",
               "broken rules")  # fmt: skip
    table = Grid("", columns)
    for _, data in rows:
        for one in data:
            table.add(
                *(one["name"], one["inspect"], one["added"], one["served"]),
                *(round(one["seconds"], 1), round(one["megabytes"])),
                "; ".join(one["problems"]) or "none",
            )
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
