"""CPU cost of a token by number of streams and by output length, at full rate.

Prints tokens/s and CPU for each token, and ratios to the smallest load; for long outputs beside
the original cog-triton's way.

    .venv/bin/python benchmarks/growth.py
"""

from __future__ import annotations

import argparse
import statistics

from _load_cost import COSTS, INCLUDED, QUICK_ACKS, LoadCost, busy_notes, measure
from _report import Figure, Grid, Report, Target, main, say
from _servers import Server, mock_server, original_server

FLAT, NONE = Target(1.2), Target(0)
_PATIENCE_S = "30"
"""Seconds without a byte after which a stream has failed."""
WIDE = tuple((streams, 128) for streams in (1, 16, 64, 128, 256))
LONG = tuple((4, tokens) for tokens in (128, 1024, 8192))
ORIGINAL_LONG = tuple((4, tokens) for tokens in (128, 1024, 2048))
Load = tuple[int, int]


def load(
    server: Server,
    name: str,
    loads: tuple[Load, ...],
    args: argparse.Namespace,
    failures: list[str],
) -> dict[Load, list[LoadCost]]:
    """Measure each load in several rounds; failed loads go to `failures` and are left out."""
    found: dict[Load, list[LoadCost]] = {}
    measure(server, {"prompt": "a", "max_tokens": 8}, 8)  # warms up
    for _ in range(1 if args.quick else args.rounds):
        for streams, tokens in loads:
            seconds = 0 if args.quick else args.seconds
            try:
                cell = measure(server, {"prompt": "a", "max_tokens": tokens}, streams, seconds)
            except RuntimeError as error:
                failures.append(f"{name} {streams} x {tokens}: {error}"[:300])
                say(failures[-1])
                continue
            found.setdefault((streams, tokens), []).append(cell)
            say(f"{name} {streams} x {tokens}: {cell.wave.tokens_per_second:.0f} tok/s")
    return found


def cost(cells: list[LoadCost]) -> float:
    """Median cost, in us a token."""
    return statistics.median(cell.us for cell in cells)


def run(args: argparse.Namespace) -> Report:
    """Measure streams, output lengths, and output lengths of the original."""
    report = Report("growth", "cost of a token as load grows")
    wide, long = (((2, 16),), ((2, 32),)) if args.quick else (WIDE, LONG)
    failures: list[str] = []
    with mock_server(environment={"TRITON_TIMEOUT": _PATIENCE_S}) as server:
        found = {
            "streams": load(server, "ours", wide, args, failures),
            "tokens": load(server, "ours", long, args, failures),
        }
    if not args.quick:
        with original_server() as server:
            found["tokens, original's way"] = load(
                server, "original's way", ORIGINAL_LONG, args, failures
            )
    for name, cells in found.items():
        if not cells:
            continue
        columns = ("streams x tokens", "tok/s", "p99 ITL ms", "CPU us/token", "to the first")
        grid = Grid(f"more {name}", (*columns, *COSTS, "load client"))
        first = cost(next(iter(cells.values())))
        for (streams, tokens), of in cells.items():
            wave = of[0].wave
            costs = (f"{cost(of) / first:.2f}", *of[0].costs(), of[0].client)
            rate = statistics.median(cell.wave.tokens_per_second for cell in of)
            grid.add(f"{streams} x {tokens}", rate, wave.itl_ms(), cost(of), *costs)
        last = list(cells)[-1]
        base = (16, 128) if name == "streams" and (16, 128) in cells else next(iter(cells))
        what = f"CPU for a token: {last[0]} x {last[1]} / {base[0]} x {base[1]}"
        what += ", original's way" if "original" in name else ""
        grown = cost(cells[last]) / cost(cells[base])
        report.figures.append(Figure(what, grown, "x", FLAT if name == "tokens" else None))
        report.grids.append(grid)
        report.notes += busy_notes({f"{name} {at}": of for at, of in cells.items()})
    report.figures.append(Figure("loads that failed", len(failures), "", NONE))
    report.notes += failures
    report.notes += [INCLUDED, QUICK_ACKS]
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.5, help="of each load, at least")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each load")


if __name__ == "__main__":
    main("growth", __doc__, run, arguments)
