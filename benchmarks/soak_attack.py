"""Attack on servers of its own: hostile clients and stops, with known text beside.

    make attack ARGS="--inputs 20000"                 # all phases, of the mock; --seed 1
    make attack ARGS="engine.tar --only drains --match SIGINT"

Phases: `inputs` (a table of hostile inputs, crowds of clients, mutated requests), `drains` (SIGTERM
under streams of every API). `make faults` stops and kills every process. It fails when a process
died of an input, a 4xx or 5xx has no code, a control stream has other text or is silent for too
long, memory stays above --growth, a request hangs or is lost without a code, or a stop cuts what it
promised to end. The report is .work/attack/ENGINE.json; --write puts it into the pages.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import _attack_clients
import _attack_report
import _drained
from _attack_clients import Attack, Findings, ServerEnded
from _attack_inputs import hostile
from _control_stream import controlled, warm_up
from _report import Grid, machine_name, say, show
from _servers import Server, mock_server, server

ROOT = Path(__file__).parents[1]
SETTLE_S, UNDISTURBED_S = 30.0, 5.0
PHASES = ("inputs", "drains")
TPS = 100


@dataclass(slots=True)
class Start:
    """Starts servers of one engine; `path` is an engine.tar, empty for the mock."""

    path: str
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, as_image: bool = False) -> AbstractContextManager[Server]:
        """A server, as ``cog-triton serve`` or as the images run it."""
        if as_image:
            served = {"COG_WEIGHTS": str(Path(self.path).resolve())}
            mock = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": str(TPS)}
            more = served if self.path else mock
            return server(environment={**more, **self.environment}, as_image=True)
        if self.path:
            return server(self.path, environment=self.environment)
        return mock_server(tps=TPS, environment=self.environment)


def main() -> int:
    """Attack, print what happened; 1 if anything did that must not."""
    options = _arguments()
    engine, began = "openvino" if options.engine else "mock", time.monotonic()
    # The table's requests name the mock's model.
    start = Start(options.engine or "", {"SERVED_MODEL_NAME": "mock"} if options.engine else {})
    say(f"attack of {engine}: seed {options.seed}, phases {', '.join(options.only)}")
    tables: dict[str, Grid] = {}
    failures: list[str] = []
    if "inputs" in options.only:
        tables["inputs"] = Grid("", _attack_clients.COLUMNS)
        failures += asyncio.run(_inputs(start, engine, options, tables["inputs"]))
    if "drains" in options.only:
        tables["drains"] = Grid("", _drained.COLUMNS)
        patient = Start(start.path, {**start.environment, "DRAIN_TIMEOUT": str(_drained.DRAIN_S)})
        for drain in _drained.drain_each(patient, engine, options.match):
            print(drain, flush=True)
            tables["drains"].add(*drain.row(engine))
            where = f"{drain.sent} to {drain.way}, {drain.killed or 'none'} killed"
            failures += [f"{where}: {problem}" for problem in drain.problems]
    run = {
        "engine": engine,
        "seed": options.seed,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine_name(),
        "seconds": round(time.monotonic() - began),
        "load": os.getloadavg()[1],
    }
    _attack_report.save(run, tables)
    for table in tables.values():
        show(table)
    if options.write:
        _attack_report.write()
    for line in failures:
        print(f"FAILED: {line}")
    print("attack: FAILED" if failures else "attack: nothing fell")
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", nargs="?", help="engine.tar; default the mock engine")
    parser.add_argument("--inputs", type=int, default=20_000, help="mutated requests; 20000")
    parser.add_argument("--seed", type=int, default=1, help="of all hostile inputs; 1")
    parser.add_argument("--growth", type=float, default=1.2, help="memory after, by that before")
    parser.add_argument("--only", default=",".join(PHASES), help="phases, by comma; all")
    parser.add_argument(
        "--match",
        default="",
        help="what is tried: the part of table and drains that has this in its name",
    )
    parser.add_argument("--write", action="store_true", help="put the reports into the pages")
    options = parser.parse_args()
    options.only = tuple(options.only.split(","))
    if unknown := set(options.only) - set(PHASES):
        parser.error(f"--only={','.join(unknown)}: must be of {','.join(PHASES)}")
    return options


async def _inputs(start: Start, engine: str, options: argparse.Namespace, grid: Grid) -> list[str]:
    """Run the table and the crowds, on as many servers as it ends, then the fuzz on the last.

    Adds the rows of `grid`; returns the failures.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    every = hostile(random.Random(options.seed))
    table = (one for one in every if options.match in f"{one.kind}: {one.name} to {one.port}")
    undisturbed, memory, found = 0.0, list[float](), dict[str, Findings]()
    todo = ["table"] if options.match else ["table", "crowds", "fuzz"]
    while todo:
        with start() as target, controlled(target, engine) as control:
            await warm_up(target, engine)
            control.take()
            await asyncio.sleep(UNDISTURBED_S)
            quiet = control.take().longest
            undisturbed, before = max(undisturbed, quiet), _megabytes(target)
            attack = Attack(target, control, found, quiet)
            try:
                while todo:
                    phase = todo[0]
                    if phase == "table":
                        await attack.table(table)
                    elif phase == "crowds":
                        await attack.crowds()
                    else:
                        await attack.fuzz(options.inputs, options.seed)
                    todo.pop(0)
            except ServerEnded as error:
                say(f"the server ended: {error}")
                if todo[0] != "table":  # which goes on behind the input that ended it
                    todo.pop(0)
                continue
            memory = [before, await _settled_memory(target, before * options.growth)]
    grid.add("none", engine, 0, "", "", round(undisturbed, 2), "", "", "")
    for kind, findings in found.items():
        grid.add(*findings.row(kind, engine))
    failures = [line for kind, findings in found.items() for line in findings.failures(kind)]
    if memory:
        before, after = memory
        grid.add("memory, MB", engine, "", f"{before:.0f}, {after:.0f}", *[""] * 5)
        if after > before * options.growth:
            failures.append(f"memory: {before:.0f} MB before, {after:.0f} MB after")
    return failures


def _megabytes(target: Server) -> float:
    return sum(target.memory_bytes().values()) / 1e6


async def _settled_memory(target: Server, limit: float) -> float:
    """Megabytes, once they are below `limit` or SETTLE_S has passed."""
    deadline = time.monotonic() + SETTLE_S
    while (used := _megabytes(target)) > limit and time.monotonic() < deadline:
        await asyncio.sleep(1)
    return used


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
