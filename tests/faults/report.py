"""Report of a run: rows by kind of fault, victim and kind of request, for terminal and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from _report import Grid, markdown_table

from faults import kinds
from faults.answers import COMPLETE, ENDED, OTHER
from faults.record import Header, Record
from faults.scenario import Scenario

MARKS = "<!-- made by make faults -->\n", "<!-- end -->"
COLUMNS = (
    *("fault", "engine", "faults", "streams", "lost", "wrong", "hung"),
    *("processes", "shm", "descriptors", "requests"),
    *("return s p50", "p99"),
)
DEATHS = ("kill", "segfault", "out_of_memory")
"""Scenarios whose victims die at once, and of nothing that goes on."""
GROWTH_MB = 60.0
"""What the front end may grow by in one server's life: caches fill, and malloc keeps pages."""


def missed(scenario: Scenario, record: Record) -> list[str]:
    """Aims of a scenario that one fault has missed."""
    checks = scenario.checks
    found = []
    for name, value, most in (
        ("lost", record.lost, checks.lost),
        ("wrong text", record.wrong, checks.wrong),
        ("hung", record.hung, checks.hung),
        ("left", record.leaks, checks.leaks),
    ):
        if value > most:
            found.append(f"{value} {name}")
    if record.back_s is None or record.back_s > checks.back_within:
        found.append(f"back after {record.back_s} s, not {checks.back_within:g} s")
    return found


def grid(scenarios: dict[str, Scenario], records: Sequence[Record]) -> Grid:
    """The table, of all faults together at its end."""
    table = Grid("", COLUMNS)
    for engine in dict.fromkeys(record.event.engine for record in records):
        of_engine = [record for record in records if record.event.engine == engine]
        for name, scenario in scenarios.items():
            if of_kind := [one for one in of_engine if one.event.scenario == name]:
                table.add(*_row(scenario.report, engine, of_kind))
    if records:
        table.add(*_row("all", "", records))
    return table


def _row(name: str, engine: str, records: Sequence[Record]) -> Iterable[object]:
    back = [one.back_s for one in records if one.back_s is not None]
    yield from (name, engine, len(records), sum(one.in_flight for one in records))
    yield sum(one.lost for one in records)
    yield sum(one.wrong for one in records)
    yield sum(one.hung for one in records)
    yield sum(one.processes for one in records)
    yield sum(one.shared_memory for one in records)
    yield sum(one.descriptors for one in records)
    yield sum(one.engine_requests for one in records)
    for percentile in (50, 99):
        yield f"{np.percentile(back, percentile):.1f}" if back else "never"


def returns(records: Sequence[Record]) -> Grid:
    """Return times by process that died at once, which a kind of fault may do to several."""
    table = Grid("", ("process that died", "engine", "faults", "return s p50", "p90", "most"))
    found: dict[tuple[str, str], list[float]] = {}
    for one in records:
        if one.event.scenario in DEATHS and one.back_s is not None:
            found.setdefault((one.event.engine, one.event.victim), []).append(one.back_s)
    for (engine, victim), back in sorted(found.items()):
        p50, p90 = np.percentile(back, (50, 90))
        table.add(victim, engine, len(back), f"{p50:.1f}", f"{p90:.1f}", f"{max(back):.1f}")
    return table


def by_kind(records: Sequence[Record]) -> Grid:
    """What became of the streams in flight of each kind of request, but those that may end."""
    columns = (
        "request",
        "engine",
        "streams",
        "went on",
        "other text",
        "E2105 as promised",
        "broke",
    )
    table = Grid("", columns)
    found: dict[tuple[str, str], Counter[str]] = {}
    for one in records:
        for name, outcomes in one.kinds.items():
            found.setdefault((one.event.engine, name), Counter()).update(outcomes)
    for engine in dict.fromkeys(engine for engine, _ in found):
        for kind in kinds.of_engine(engine):
            outcomes = found.get((engine, kind.name), Counter())
            told = [outcomes[name] for name in (COMPLETE, OTHER, ENDED)]
            total = outcomes.total()
            table.add(kind.name, engine, total, *told, total - sum(told))
    return table


def growth_mb(records: Sequence[Record]) -> float:
    """Most that the front end's memory has grown by since the first fault of a server."""
    first: dict[int, float] = {}
    grown = [
        one.memory_mb - first.setdefault(one.server, one.memory_mb)
        for one in records
        if one.memory_mb  # the server has ended otherwise
    ]
    return max(grown, default=0.0)


def markdown(
    header: Header, records: Sequence[Record], tables: Sequence[Grid], notes: Sequence[str]
) -> str:
    """The tables as they stand in the page, with what they are of."""
    commits = Counter(one.commit for one in records)
    of = ", ".join(f"{commit} ({count} faults)" for commit, count in commits.items())
    told = f"{header.date}, commit {of}, seed {header.seed}; {header.machine}."
    parts = [part for table in tables for part in (markdown_table(table), "")]
    return "\n".join([told, "", *parts, *(f"- {note}" for note in notes), ""])
