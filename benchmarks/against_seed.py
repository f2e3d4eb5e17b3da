"""The way through Cog and Triton against the first cog-triton's way, flat out.

Both stand on the same Triton, mock engine, Cog and live streaming, take turns within one run, and
differ in what is between: the ensemble, httpx by line, JSON for each event, the whole decoded anew
(see seed_way/). Prints tokens/s, ITL and CPU for each token at each concurrency, and ratios.

    .venv/bin/python benchmarks/against_seed.py [--seed-checkout DIR]
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path

from _cells import COSTS, INCLUDED, QUICK_ACKS, Cell, busy_notes, measure
from _mock_alone import MockAlone
from _report import Figure, Grid, Report, Target, main, say
from _servers import Server, mock_server, seed_server

OURS, SEED, OWN = "ours", "seed's way", "seed's code"
FASTER, CHEAP = Target(4, least=True), Target(60)
CHEAP_AT = 64
STREAMS = (1, 8, 32, 64)
JOINED = 8
Case = tuple[str, int, int]
"""A side, streams, tokens of each."""


def cases(args: argparse.Namespace, joined: int) -> list[tuple[int, int]]:
    """Streams and tokens of each."""
    if args.quick:
        return [(2, 32)]
    return [(streams, 128) for streams in args.streams] + ([(8, 1024)] if joined == 1 else [])


def compare(args: argparse.Namespace, joined: int) -> dict[Case, list[Cell]]:
    """Every load on every side, in turns."""
    found: dict[Case, list[Cell]] = {}
    rounds, seconds = (1, 0.0) if args.quick else (args.rounds, args.seconds)
    with ExitStack() as stack:
        sides: dict[str, Server] = {
            OURS: stack.enter_context(mock_server(f"--tokens-per-response={joined}")),
            SEED: stack.enter_context(seed_server(tokens_per_response=joined)),
        }
        if args.seed_checkout:
            own = seed_server(tokens_per_response=joined, checkout=args.seed_checkout)
            sides[OWN] = stack.enter_context(own)
        for streams, tokens in cases(args, joined):
            inputs = {"prompt": "Tell me about the sea.", "max_tokens": tokens}
            for round_ in range(rounds + 1):
                for name, server in sides.items():
                    if not round_ and (streams, tokens) != cases(args, joined)[0]:
                        continue  # each server is warmed up once
                    cell = measure(server, inputs, streams, seconds if round_ else 0)
                    rate = cell.wave.tokens_per_second
                    say(f"{joined} a response, {streams} x {tokens}, {name}: {rate:.0f} tok/s")
                    if round_:
                        found.setdefault((name, streams, tokens), []).append(cell)
    return found


def tell(found: dict[Case, list[Cell]], joined: int, report: Report) -> None:
    """Add a table and the figures of one kind of response."""
    kind = f"{joined} token{'s' * (joined > 1)} a response"
    columns = ("streams x tokens", "side", "tok/s", "p99 ITL ms", "TTFT ms", "CPU us/token")
    grid = Grid(f"flat out, {kind}", (*columns, *COSTS, "load client"))
    for (name, streams, tokens), cells in found.items():
        middle = sorted(cells, key=lambda cell: cell.wave.tokens_per_second)[len(cells) // 2]
        wave = middle.wave
        grid.add(
            f"{streams} x {tokens}",
            name,
            wave.tokens_per_second,
            wave.itl_ms(),
            wave.ttft_ms(),
            middle.us,
            *middle.costs(),
            middle.client,
        )
        if name == OURS:
            continue
        ours = found[OURS, streams, tokens]
        pairs = list(zip(ours, cells, strict=True))
        faster = statistics.median(
            a.wave.tokens_per_second / b.wave.tokens_per_second for a, b in pairs
        )
        cheaper = statistics.median(b.us / a.us for a, b in pairs)
        what = f"{streams} x {tokens}, {kind}"
        report.figures.append(Figure(f"tok/s: ours / {name}, {what}", faster, "x", FASTER))
        report.figures.append(Figure(f"CPU: {name} / ours, {what}", cheaper))
    for (name, streams, tokens), cells in found.items():
        if name == OURS and streams == CHEAP_AT:
            cost = statistics.median(cell.us for cell in cells)
            what = f"CPU of all but the client, {streams} x {tokens}, {kind}"
            report.figures.append(Figure(what, cost, "us/token", CHEAP))
    report.grids.append(grid)
    named = {
        f"{name}, {streams} streams, {kind}": cells for (name, streams, _), cells in found.items()
    }
    report.notes.extend(busy_notes(named))


def run(args: argparse.Namespace) -> Report:
    """Both kinds of response."""
    report = Report("against_seed", "through Cog and Triton, against the first cog-triton's way")
    for joined in (1,) if args.quick else (1, JOINED):
        tell(compare(args, joined), joined, report)
        with MockAlone(joined) as mock:
            own = mock.us(CHEAP_AT)
        report.notes.append(f"the mock alone takes {own:.1f} us/token, {joined} a response")
    report.notes += [
        INCLUDED,
        QUICK_ACKS,
        "ITL is from token to token, 0 between tokens of one read",
        "both sides stream live in the same way; the seed's had an older Cog for that",
        "the seed's way has one instance of pre- and postprocessing; with its 64 it is slower",
    ]
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="concurrency")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each load")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--seed-checkout", type=Path, help="the first cog-triton's sources")


if __name__ == "__main__":
    main("against_seed", __doc__, run, arguments)
