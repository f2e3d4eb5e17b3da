"""The numbers of aiperf and of `cog-triton bench` for the same server and load, side by side.

Both send chats to one mock server, in turns within one run. Prints each metric that both define,
with the ratio of ours to aiperf's; docs/bench.md has what they mean. Exits with 1 if a mean or a
median is not within 5 %.

    .venv/bin/python benchmarks/aiperf_beside.py --aiperf aiperf-env/bin/aiperf
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import _aiperf
from _aiperf import Load
from _servers import Server, mock_server
from rich.console import Console
from rich.table import Table

from cog_triton.engines.mock import mock_directory
from cog_triton.errors import CogTritonError, NothingSucceeded

WITHIN = 0.05


class Metric(NamedTuple):
    """A metric under both names; ours in seconds is theirs in milliseconds (`scale`)."""

    title: str
    theirs: str
    ours: str
    scale: float = 1000
    points: Sequence[tuple[str, str]] = (("avg", "mean"), ("p50", "p50"), ("p99", "p99"))


_ONE = (("avg", "mean"),)
METRICS = (
    Metric("TTFT, ms", "time_to_first_token", "ttft_from_sending"),
    Metric("ITL (our TPOT), ms", "inter_token_latency", "tpot"),
    Metric("ICL (our ITL), ms", "inter_chunk_latency", "itl"),
    Metric("Request latency, ms", "request_latency", "e2el_from_sending"),
    Metric("Tokens/s of a user", "output_token_throughput_per_user", "tps_per_user", 1),
    Metric("Input tokens", "input_sequence_length", "input_tokens", 1, _ONE),
    Metric("Output tokens", "output_sequence_length", "output_tokens", 1, _ONE),
    Metric("Requests/s", "request_throughput", "requests", 1, _ONE),
    Metric("Output tokens/s", "output_token_throughput", "output_tokens", 1, _ONE),
)
_RATES = ("request_throughput", "output_token_throughput")


@dataclass(frozen=True, slots=True)
class Row:
    """One number of both."""

    title: str
    point: str
    theirs: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours to theirs; 1 where both are 0."""
        if not self.theirs:
            return 1.0 if not self.ours else float("inf")
        return self.ours / self.theirs

    @property
    def within(self) -> bool:
        """Whether they differ by 5 % at most."""
        return abs(self.ratio - 1) <= WITHIN


def rows(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[Row]:
    """Each metric of aiperf's report and of a run of ours, in aiperf's units."""
    found = []
    for metric in METRICS:
        for their_point, our_point in metric.points:
            if metric.theirs in _RATES:
                own = ours["rates"][metric.ours]
            else:
                own = ours["metrics"][metric.ours][our_point] * metric.scale
            told = _aiperf.value(theirs, metric.theirs, their_point)
            found.append(Row(metric.title, their_point, told, own))
    return found


def medians(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The median of each side's number over all rounds."""
    return [
        Row(
            same[0].title,
            same[0].point,
            statistics.median(row.theirs for row in same),
            statistics.median(row.ours for row in same),
        )
        for same in zip(*rounds, strict=True)
    ]


def ours(url: str, tokenizer: Path, load: Load, report: Path) -> dict[str, Any]:
    """A run of `cog-triton bench`, from its JSON in `report`; raises E2400 if it fails."""
    options: dict[str, object] = {
        "target": "openai",
        "url": url,
        "unit": "concurrency",
        "rate": load.concurrency,
        "requests": load.requests,
        "warmup": load.warmup,
        "n_input_tokens": load.input_tokens,
        "n_output_tokens": load.output_tokens,
        "tokenizer": tokenizer,
        "seed": load.seed,
        "json": report,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "cog_triton", "bench", *words],
        env={**os.environ, "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NothingSucceeded(f"cog-triton bench ended with {done.returncode}:\n{done.stdout}")
    (found,) = json.loads(report.read_text())["runs"]
    return dict(found)


def measure(
    server: Server, aiperf: Path, load: Load, rounds: int, artifacts: Path, say: Console
) -> list[Row]:
    """Both in turns, `rounds` times, the first of a round in turns, too; the medians."""
    tokenizer = mock_directory.make(artifacts / "engine")
    found = []
    for number in range(1, rounds + 1):
        written = artifacts / f"aiperf-{number}"
        words = _aiperf.command(aiperf, server.openai, tokenizer, load, written)
        report = artifacts / f"bench-{number}.json"
        if number % 2:  # else whatever else the machine does is always the same one's
            theirs = _aiperf.run(words, written)
            own = ours(server.openai, tokenizer, load, report)
        else:
            own = ours(server.openai, tokenizer, load, report)
            theirs = _aiperf.run(words, written)
        require_whole(theirs, own, load)
        found.append(rows(theirs, own))
        if number == 1:
            say.print(f"aiperf {_aiperf.version(theirs)}: {' '.join(words)}", markup=False)
        warning = own["generator"]["warning"] or "done"
        say.print(f"Round {number} of {rounds}: {warning}", markup=False)
    return medians(found)


def require_whole(theirs: Mapping[str, Any], own: Mapping[str, Any], load: Load) -> None:
    """Raise E2400 unless both completed every request."""
    told = _aiperf.failures(theirs) + list(own["failures"])
    answered = (_aiperf.value(theirs, "request_count", "avg"), own["completed"])
    if told or answered != (load.requests, load.requests):
        raise NothingSucceeded(
            f"of {load.requests} requests aiperf completed {answered[0]:g} and cog-triton bench"
            f" {answered[1]}: {told}"
        )


def table(found: Sequence[Row], title: str) -> Table:
    """What is printed."""
    shown = Table(title=title)
    for name in ("metric", "", "aiperf", "cog-triton bench", "ratio", ""):
        shown.add_column(name, justify="left" if name in ("metric", "") else "right")
    for row in found:
        verdict = "within 5 %" if row.within else "not within 5 %"
        numbers = (f"{row.theirs:.2f}", f"{row.ours:.2f}", f"{row.ratio:.3f}")
        shown.add_row(row.title, row.point, *numbers, verdict)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aiperf", type=Path, required=True, help="the program")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=4, help="requests, not counted")
    parser.add_argument("--n_input_tokens", type=int, default=1000)
    parser.add_argument("--n_output_tokens", type=int, default=100)
    parser.add_argument("--tps", type=float, default=100, help="of each stream")
    parser.add_argument("--prefill", type=float, default=0.2, help="ms for each input token")
    parser.add_argument("--rounds", type=int, default=3, help="of both; medians are shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--artifacts", type=Path, help="an empty directory for all they write")
    args = parser.parse_args()
    load = Load(
        concurrency=args.concurrency,
        requests=args.requests,
        warmup=args.warmup,
        input_tokens=args.n_input_tokens,
        output_tokens=args.n_output_tokens,
        seed=args.seed,
    )
    say = Console(width=None if sys.stdout.isatty() else 100, soft_wrap=True)
    try:
        _aiperf.require(args.aiperf)
        with (
            tempfile.TemporaryDirectory(prefix="aiperf-beside-") as scratch,
            mock_server(f"--prefill={args.prefill:g}", tps=args.tps) as server,
        ):
            artifacts = args.artifacts or Path(scratch)
            found = measure(server, args.aiperf, load, args.rounds, artifacts, say)
    except CogTritonError as error:
        Console(stderr=True).print(str(error), markup=False, soft_wrap=True)
        return 2
    title = (
        f"{load.requests} requests, {load.concurrency} at once, {load.input_tokens} tokens in,"
        f" {load.output_tokens} out; mock at {args.tps:g} tok/s"
    )
    say.print(table(found, title))
    return 0 if all(row.within for row in found if row.point != "p99") else 1


if __name__ == "__main__":
    sys.exit(main())
