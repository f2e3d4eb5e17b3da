"""Our server beside any other that speaks OpenAI's API, in turns, in one run.

    cog-triton serve engine.tar                                     # ours, on port 8080
    .venv/bin/python benchmarks/against.py http://peer:8000 --streams 1,16,64

Both have to be warm, and to serve the same model on the same kind of machine. Ratios are ours by
the peer's, the median of the rounds, which begin with either side by turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median

from _load import Wave, busy_notes, wave
from _report import Figure, Grid, Report, main, say
from _servers import CHAT

from cog_triton.bench.options import TargetName, default_url

OURS, PEER = "ours", "the peer"


FIGURES: dict[str, Callable[[Wave], float]] = {
    "TTFT p50, ms": lambda found: found.ttft_ms(50),
    "TTFT p99, ms": lambda found: found.ttft_ms(99),
    "ITL p50, ms": lambda found: found.itl_ms(50),
    "ITL p99, ms": lambda found: found.itl_ms(99),
    "tokens/s": lambda found: found.tokens / found.load.wall,
}
"""What is compared, by name."""


def run(args: argparse.Namespace) -> Report:
    """Measure both sides at each number of streams."""
    rounds, tokens = (1, 8) if args.quick else (args.rounds, args.tokens)
    report = Report("against", f"{args.ours} beside {args.url}")
    sides = {OURS: (args.ours, args.model), PEER: (args.url, args.peer_model)}
    grid = Grid(f"medians of {rounds} rounds", ("streams", "", *FIGURES))
    for streams in map(int, args.streams.split(",")):
        cells: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(-1, rounds):  # the first one warms up
            for name in list(sides)[:: -1 if number % 2 else 1]:
                url, model = sides[name]
                done = wave(url, {"max_tokens": tokens}, streams, api=CHAT, model=model)
                say(f"{streams} streams, {name}: {done.tokens / done.load.wall:.1f} tokens/s")
                if number >= 0:
                    cells[name].append({key: of(done) for key, of in FIGURES.items()})
                    report.notes += busy_notes({f"{streams} streams, {name}": done})
        for name, found in cells.items():
            grid.add(streams, name, *(median(one[key] for one in found) for key in FIGURES))
        report.figures += ratios(streams, cells)
    report.grids.append(grid)
    return report


def ratios(streams: int, cells: dict[str, list[dict[str, float]]]) -> Iterator[Figure]:
    """Ratios of the pairs, with their spread in the name."""
    for name in FIGURES:
        pairs = [(ours[name], its[name]) for ours, its in zip(*cells.values(), strict=True)]
        if found := [ours / its for ours, its in pairs if its]:
            spread = f"{min(found):.2f} to {max(found):.2f}"
            yield Figure(f"{streams} streams: {name} ({spread})", median(found))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="base URL of the peer")
    parser.add_argument("--ours", default=default_url(TargetName.OPENAI), help="base URL of ours")
    parser.add_argument("--model", help="name of ours; its only one")
    parser.add_argument("--peer-model", help="name of the peer's; its only one")
    parser.add_argument("--streams", default="1,16,64", help="at once, by comma; 1,16,64")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer; 128")
    parser.add_argument("--rounds", type=int, default=5, help="of both sides; 5")


if __name__ == "__main__":
    main("against", __doc__, run, arguments)
