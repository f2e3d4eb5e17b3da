"""Streams at a fixed rate: whether each arrives at the rate its tokens are generated at.

All streams begin at once. Prints the mean rate of a stream from sending to its end, gaps between
tokens, and times to the first one, beside what the mock engine is told to do.

    .venv/bin/python benchmarks/fixed_rate.py
"""

from __future__ import annotations

import argparse
import statistics

from _load_cost import COSTS, INCLUDED, QUICK_ACKS, LoadCost, busy_notes, measure
from _report import Figure, Grid, Report, Target, main, say
from _servers import mock_server

LOADS = (
    (24, 44, False),
    (24, 100, False),
    (64, 44, False),
    (64, 100, False),
    (24, 44, True),
    (64, 100, True),
)
"""Streams, tokens per second of each, and whether the client is plain."""
DELIVERED = {(64, 100, False): Target(97, least=True)}


def run(args: argparse.Namespace) -> Report:
    """Measure every load, one after another."""
    seconds, loads = (0.3, LOADS[:1]) if args.quick else (args.seconds, LOADS)
    report = Report("fixed_rate", "streams at a set rate")
    columns: tuple[str, ...] = (
        "streams x tok/s",
        "a stream's",
        "slowest",
        "ITL ms: p50",
        "p99",
        "made",
        "TTFT ms: p50",
        "p99",
    )
    columns += ("CPU us/token", *COSTS, "load client")
    grid = Grid("fixed rate: measured beside what is made", columns)
    cells: dict[str, list[LoadCost]] = {}
    with mock_server() as server:
        measure(server, {"max_tokens": 8}, 8)  # warms up
        for streams, tps, plain in loads:
            inputs = {"tps": tps, "n_output_tokens": max(2, round(tps * seconds))}
            cell = measure(server, inputs, streams, plain=plain)
            wave = cell.wave
            rates = [stream.tokens_per_second for stream in wave.streams]
            mean = statistics.mean(rates)
            name = f"{streams} x {tps}{', plain client' * plain}"
            say(f"{name}: {mean:.2f} tok/s")
            cells[name] = [cell]
            made = 1000 / tps
            grid.add(
                name,
                f"{mean:.2f}",
                f"{min(rates):.2f}",
                wave.itl_ms(50),
                wave.itl_ms(99),
                made,
                wave.ttft_ms(50),
                wave.ttft_ms(99),
                cell.us,
                *cell.costs(),
                cell.client,
            )
            target = DELIVERED.get((streams, tps, plain))
            report.figures += [
                Figure(f"{name}: mean rate of a stream", mean, "tok/s", target),
                Figure(f"{name}: p99 ITL / made", wave.itl_ms(99) / made),
                Figure(f"{name}: median TTFT beyond what is made", wave.ttft_ms() - made, "ms"),
            ]
    report.grids.append(grid)
    report.notes += [INCLUDED, QUICK_ACKS, *busy_notes(cells)]
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5, help="of each load")


if __name__ == "__main__":
    main("fixed_rate", __doc__, run, arguments)
