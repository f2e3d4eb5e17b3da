"""Fault injection under load (make faults): strikes servers, and accounts for every stream.

    make faults MINUTES=20 ARGS="--engine mock,openvino --only kill,stop"

Exits with 1 when an aim of a scenario was missed. Ctrl-C prints the tables so far.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import clean_environment  # noqa: E402

from faults import report, sandbox, scenario  # noqa: E402
from faults.engines import PROFILES  # noqa: E402
from faults.runner import Runner  # noqa: E402
from faults.scenario import ScenarioError  # noqa: E402
from faults.strikes import STRIKES  # noqa: E402

RESULTS = ROOT / ".work" / "faults"
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=500, help="of each engine; 500")
    parser.add_argument("--engine", type=_names, default=tuple(PROFILES), help="by comma; all")
    parser.add_argument("--only", type=_names, default=(), help="scenarios, by comma; all")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and the load; 1")
    parser.add_argument("--minutes", type=float, help="end after so many, whatever is left")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of a run")
    args = parser.parse_args()
    if unknown := set(args.engine) - set(PROFILES):
        parser.error(f"--engine={','.join(unknown)}: must be of {','.join(PROFILES)}")
    return args


def main() -> int:
    """Run the plan; returns 0 if every aim was met."""
    args = arguments()
    clean_environment.clean()
    sandbox.clear()
    for number in _INTERRUPTS:  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    try:
        scenarios = scenario.read(only=args.only)
    except ScenarioError as error:
        print(error, file=sys.stderr)
        return 2
    lacking = {name: STRIKES[one.fault].lacking() for name, one in scenarios.items()}
    fits = {name: one for name, one in scenarios.items() if lacking[name] is None}
    end = time.monotonic() + (args.minutes * 60 if args.minutes else math.inf)
    runner = Runner(fits, args.results, end)
    plans = [scenario.plan(fits, engine, args.faults, args.seed) for engine in args.engine]
    try:
        runner.run(report.by_turns(plans))
    except KeyboardInterrupt:
        runner.failures.append("interrupted")
    finally:
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)
        sandbox.clear()
    for name, why in lacking.items():
        if why is not None:
            print(f"{name}: left out here: {why}")
    return report.conclude(runner)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
