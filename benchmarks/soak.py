"""Soak: users of every API for an hour, each answer accounted for, and memory sampled.

    .venv/bin/python benchmarks/soak.py --minutes 60
    .venv/bin/python benchmarks/soak.py --engine openvino --users 8 --samples FILE

Answers of 6 to 100 tokens, streamed and whole; a quarter of the clients leave in the middle. It
fails when an answer has another text than it has to, or ends in neither text nor a code, when the
server's own count of answers is not the clients', when processes, ports or descriptors grow, or
memory does once the run's first third is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from urllib.request import urlopen

from _report import RESULTS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from faults import engines
from faults.apis import COMPLETE, GOOD, LEFT, OTHER, TRITON, Answer
from faults.load import Load
from faults.processes import Held
from faults.runner import warm_up
from faults.target import Target, served

_LEAVING, _SAMPLE_PERIOD_S, _SETTLE_S = 0.25, 10.0, 15.0
_ENDS = re.compile(r'^cog_triton_requests_total\{.*outcome="(?:stop|length)".*\} (\d+)', re.M)
_SPARE = Held(0, 0, 0, 8)
PLATEAU_MINUTES = 30
"""Shortest run whose memory is judged: in a shorter one caches still fill."""
PLATEAU, END = (1 / 3, 1 / 2), (5 / 6, 1.0)
"""Shares of a run: caches are full and malloc has its arenas by the first; later growth is a leak.
"""
TOLERANCE, TOLERANCE_MB = 0.05, 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server: seconds, answers so far, and MB of each part without files."""

    seconds: float
    answers: int
    megabytes: dict[str, float]


def growth(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Median MB of each part on the plateau and at the end; 0 if it did not run then."""
    found: dict[str, list[float]] = {}
    for part in sorted({part for sample in samples for part in sample.megabytes}):
        found[part] = []
        for first, last in (PLATEAU, END):
            low, high = first * samples[-1].seconds, last * samples[-1].seconds
            within = [one for one in samples if low <= one.seconds <= high]
            held = [one.megabytes[part] for one in within if part in one.megabytes]
            found[part].append(statistics.median(held) if held else 0.0)
    return found


def wrong(answers: Sequence[Answer], counted: int) -> list[str]:
    """Answers that broke a promise, and ends that the server did not count, or counted twice.

    A client that leaves may do so just as its answer ends, which the server then calls an end.
    """
    found = [str(one) for one in answers if one.outcome not in GOOD]
    own = [one.outcome for one in answers if one.kind.api is not TRITON]  # which it does not count
    ends, left = own.count(COMPLETE) + own.count(OTHER), own.count(LEFT)
    if not ends <= counted <= ends + left:
        found.append(f"clients saw {ends} ends and left {left} times; the server counted {counted}")
    return found


def ends(target: Target) -> int:
    """Answers that the server says have ended."""
    with urlopen(f"{target.urls['v1']}/metrics", timeout=30) as answer:
        return sum(map(int, _ENDS.findall(answer.read().decode())))


async def soak(target: Target, options: argparse.Namespace) -> list[str]:
    """Run the load; prints the account, and returns what went wrong."""
    questions = engines.questions(options.engine, target, options.seed)
    seed = str(options.seed)
    load = Load.of(target, options.engine, questions, options.users, 0.5, _LEAVING, seed)
    answers: list[Answer] = []
    samples: list[Sample] = []
    options.samples.parent.mkdir(parents=True, exist_ok=True)
    async with load.running():
        before = await warm_up(target, load)
        first, began = ends(target), time.monotonic()
        load.resume()
        with options.samples.open("w") as file:
            while (seconds := time.monotonic() - began) < options.minutes * 60:
                await asyncio.sleep(min(_SAMPLE_PERIOD_S, options.minutes * 60 - seconds))
                answers += load.ledger.take()
                memory = target.server.memory_bytes()
                megabytes = {part: round(used / 1e6, 2) for part, used in memory.items()}
                samples.append(Sample(time.monotonic() - began, len(answers), megabytes))
                print(json.dumps(asdict(samples[-1])), file=file, flush=True)
        load.hold()
        await load.until_ended(list(load.ledger.open), _SETTLE_S)
    answers += load.ledger.take()
    deadline = time.monotonic() + _SETTLE_S
    while any(astuple(target.held().beyond(before, _SPARE))) and time.monotonic() < deadline:
        await asyncio.sleep(0.3)
    found = wrong(answers, ends(target) - first)
    print(f"{len(answers)} answers in {samples[-1].seconds:.0f} s")
    beyond = target.held().beyond(before, _SPARE)
    if any(astuple(beyond)):
        found.append(f"it holds {beyond} more than before")
    for part, (plateau, end) in growth(samples).items():
        print(f"{part:24}{samples[0].megabytes.get(part, 0):8.1f}{plateau:8.1f}{end:8.1f} MB")
        leaks = plateau and end > plateau * (1 + TOLERANCE) + TOLERANCE_MB
        if leaks and options.minutes >= PLATEAU_MINUTES:
            found.append(f"memory of {part}: {end:.1f} MB, {plateau:.1f} on the plateau")
    return found


def main() -> int:
    """Run the soak; returns 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(engines.PROFILES), default="mock")
    parser.add_argument("--minutes", type=float, default=10, help="of load; 10")
    parser.add_argument("--users", type=int, default=12, help="at once; 12")
    parser.add_argument("--seed", type=int, default=1, help="of the questions; 1")
    parser.add_argument("--samples", type=Path, default=RESULTS / "soak.jsonl", help="JSON lines")
    options = parser.parse_args()
    with engines.prepared(options.engine) as start, served(start) as target:
        found = asyncio.run(soak(target, options))
    print("\n".join(["WRONG:", *found]) if found else "nothing was wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
