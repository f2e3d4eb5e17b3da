"""Fault injection under load (make faults): prints each fault, and writes the table of the page.

    make faults ARGS="--faults 760,240 --engine mock,openvino --jobs 3"

Exits with 1 when an aim of a scenario was missed. Ctrl-C prints the table so far; --resume goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import _report  # noqa: E402
import clean_environment  # noqa: E402

from faults import cgroups, kinds, report, scenario  # noqa: E402
from faults.engines import PROFILES  # noqa: E402
from faults.record import Header, Records, RecordsError  # noqa: E402
from faults.runner import Runner, possible  # noqa: E402
from faults.scenario import ScenarioError  # noqa: E402

RESULTS = ROOT / ".work" / "faults"
_FAULTS = "of all engines together, or of each one, by comma; 1000"
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
PAGE = ROOT / "docs" / "reliability.md"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=_names, default=("1000",), help=_FAULTS)
    parser.add_argument("--engine", type=_names, default=tuple(PROFILES), help="by comma; all")
    parser.add_argument("--only", type=_names, default=(), help="scenarios, by comma; all")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and the load; 1")
    parser.add_argument("--jobs", type=int, default=1, help="servers side by side; 1")
    parser.add_argument("--minutes", type=float, help="end after so many, whatever is left")
    parser.add_argument("--resume", action="store_true", help="go on with what --results has")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of a run")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    args = parser.parse_args()
    if unknown := set(args.engine) - set(PROFILES):
        parser.error(f"--engine={','.join(unknown)}: must be of {','.join(PROFILES)}")
    if not all(one.isdecimal() and int(one) for one in args.faults):
        parser.error(f"--faults={','.join(args.faults)}: must be 1 or more")
    if len(args.faults) not in (1, len(args.engine)):
        parser.error(f"--faults={','.join(args.faults)}: must be one number, or one an engine")
    if args.jobs < 1:
        parser.error(f"--jobs={args.jobs}: must be 1 or more")
    args.faults = _shares([int(one) for one in args.faults], args.engine)
    return args


def _shares(faults: list[int], engines: tuple[str, ...]) -> dict[str, int]:
    """Faults of each engine; one number is shared evenly, and what is over is the first one's."""
    if len(faults) < len(engines):
        share, over = divmod(faults[0], len(engines))
        faults = [share + over, *[share] * (len(engines) - 1)]
    return dict(zip(engines, faults, strict=True))


def main() -> int:
    """Run the plan; returns 0 if every aim was met."""
    args = arguments()
    clean_environment.clean()
    cgroups.clear()
    for number in _INTERRUPTS:  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    try:
        scenarios, left_out = possible(scenario.read_all(args.only))
        records = Records(args.results / "records.jsonl", _header(args), args.resume)
    except (ScenarioError, RecordsError) as error:
        print(error, file=sys.stderr)
        return 2
    notes = [f"{name}: left out here: {why}" for name, why in left_out.items()]
    end = time.monotonic() + (args.minutes * 60 if args.minutes else math.inf)
    runner = Runner(scenarios, records, args.results, end, _report.say)
    broken = ""
    try:
        asyncio.run(runner.run(_plans(args, scenarios), args.jobs))
    except KeyboardInterrupt:
        broken = "interrupted"
    finally:
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)
        cgroups.clear()
    return _tell(args, runner, notes, broken)


def _plans(
    args: argparse.Namespace, scenarios: dict[str, scenario.Scenario]
) -> list[list[scenario.Event]]:
    plans: list[list[scenario.Event]] = []
    for engine, count in args.faults.items():
        first = sum(map(len, plans))
        plans.append(scenario.plan(scenarios, engine, count, args.seed, first))
    return plans


def _tell(args: argparse.Namespace, runner: Runner, notes: list[str], broken: str) -> int:
    scenarios, records = runner.scenarios, runner.records
    missed = [*runner.failures]
    for record in records.all:
        for aim in report.missed(scenarios[record.event.scenario], record):
            one = record.event
            missed.append(f"{one.number + 1} {one.engine} {one.scenario} {one.victim}: {aim}")
            missed += [f"    {problem}" for problem in record.problems]
    for engine in args.engine:
        if names := kinds.left_out(engine):
            notes.append(f"requests that {engine} cannot do: {names}")
    grown = report.growth_mb(records.all)
    if grown > report.GROWTH_MB:
        missed.append(f"the front end grew by {grown:.0f} MB")
    notes.append(f"the front end's memory grew by {grown:.0f} MB at most in one server's life")
    notes.append(
        f"{len(records.all)} of {records.header.total} planned faults were injected;"
        f" {args.jobs} servers ran side by side; the machine's load was {os.getloadavg()[2]:.0f}"
    )
    of = records.all
    tables = report.grid(scenarios, of), report.by_kind(of), report.returns(of)
    for table in tables:
        _report.show(table)
    for line in (*notes, *missed, broken):
        print(line)
    if args.write and not broken:
        _report.write_between(
            PAGE, report.MARKS, report.markdown(records.header, records.all, tables, notes)
        )
    print(f"{len(records.all)} faults: {'aims MISSED' if missed else 'all aims met'}")
    return 1 if missed or broken else 0


def _header(args: argparse.Namespace) -> Header:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return Header(
        seed=args.seed,
        faults=args.faults,
        only=args.only,
        commit=commit.stdout.strip() or "unknown",
        machine=f"{_report.machine_name()}, {os.uname().sysname} {os.uname().release}",
        date=time.strftime("%Y-%m-%d"),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
