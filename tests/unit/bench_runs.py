"""Options, request records and runs for tests of the benchmark."""

from __future__ import annotations

from array import array
from typing import Any

from cog_triton.bench.load_generator import GeneratorUsage, RunResult
from cog_triton.bench.options import Lengths, Options
from cog_triton.bench.request_record import OK, Record

START = 1000.0


def options(**changes: Any) -> Options:
    values = {
        "url": "http://127.0.0.1:1",
        "requests": 4,
        "input_lengths": Lengths.parse("n", "10"),
        "output_lengths": Lengths.parse("n", "5"),
        **changes,
    }
    return Options(**values)


def record(index: int, due: float, *arrivals: float, **changes: Any) -> Record:
    """Due, sent 0.1 s later, and a piece at each of `arrivals`, the last of which ends it."""
    values = {
        "sent": START + due + 0.1,
        "ended": START + arrivals[-1] if arrivals else START + due + 0.2,
        "status": OK,
        "wanted_tokens": len(arrivals),
        "output_tokens": len(arrivals),
        "input_tokens": 10,
        **changes,
    }
    found = Record(index=index, scheduled=START + due, **values)
    for at in arrivals:
        found.output(START + at, 1)
    return found


def run(*records: Record, cpu: float = 0.5, lag: float = 0.001, **changes: Any) -> RunResult:
    ended = max(item.ended for item in records)
    usage = GeneratorUsage(cpu=cpu, wall=10.0, lags=array("d", [lag] * 10))
    values = {"notes": (), "started": START, "ended": ended, "interrupted": False, **changes}
    return RunResult(records=list(records), usage=usage, **values)
