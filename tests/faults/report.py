"""Report of strikes: a row for each kind of fault, and the failures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from _report import Grid, machine_name, show

from faults.ledger import Account
from faults.runner import Runner
from faults.scenario import Event, Scenario

COLUMNS = (
    *("fault", "engine", "faults", "streams", "lost", "wrong", "hung", "left"),
    *("return s p50", "p99"),
)


def by_turns(plans: Sequence[Sequence[Event]]) -> Iterator[Event]:
    """Events of several engines, one of each after the other."""
    for events in itertools.zip_longest(*plans):
        yield from (event for event in events if event is not None)


def conclude(runner: Runner) -> int:
    """Print table and failures; returns 0 if there is no failure."""
    show(grid(runner.scenarios, runner.accounts))
    print(machine_name())
    for line in runner.failures:
        print(f"FAILED: {line}")
    print(f"{len(runner.accounts)} faults: {'aims MISSED' if runner.failures else 'all aims met'}")
    return 1 if runner.failures else 0


def grid(scenarios: Mapping[str, Scenario], accounts: Sequence[tuple[Event, Account]]) -> Grid:
    """The table, of all faults together at its end."""
    rows: dict[tuple[str, str], list[Account]] = {}
    for event, one in accounts:
        name = scenarios[event.scenario].report
        rows.setdefault((event.engine, name), []).append(one)
    rows["", "all"] = [one for _, one in accounts]
    table = Grid("", COLUMNS)
    for (engine, name), of in rows.items():
        back = [one.back_s for one in of if one.back_s is not None]
        table.add(
            *(name, engine, len(of), sum(one.flight for one in of)),
            *(sum(one.lost for one in of), sum(one.wrong for one in of)),
            *(sum(one.hung for one in of), sum(sum(one.held.values()) for one in of)),
            *(f"{np.percentile(back, part):.1f}" if back else "never" for part in (50, 99)),
        )
    return table
