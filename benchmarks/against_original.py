"""Throughput, ITL and CPU of the serving path beside the original cog-triton's.

Both have the same Triton, mock engine, Cog and live streaming, and take turns within one run. They
differ in what is between: the ensemble, httpx by line, JSON for each event, and all tokens decoded
again for each (original_way/). Prints tokens/s, ITL and CPU a token at each concurrency, failures,
and ratios.

    .venv/bin/python benchmarks/against_original.py [--original-checkout DIR]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from _load_cost import COSTS, INCLUDED, QUICK_ACKS, LoadCost, busy_notes, measure
from _mock_alone import MockAlone
from _report import Figure, Grid, Report, Target, main, say
from _servers import Server, mock_server, original_server

OURS, ORIGINAL, OWN = "ours", "original's way", "original's code"
FASTER, CHEAP = 4, Target(60)
CHEAP_AT = 64
STREAMS = (1, 8, 32, 64)
PATIENCE = {"TRITON_TIMEOUT": "10"}
"""Seconds without a byte after which a stream has failed: it waits for what Triton lost."""
Load = tuple[int, int]
"""Streams, and tokens of each."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the engine sends: `rate` tokens/s for all streams together, 0 for flat out.

    `least` is the target of the ratio to the original's tok/s by number of streams, if not FASTER.
    """

    name: str
    rate: float
    long: tuple[Load, ...] = ()
    least: Mapping[int, float] = field(default_factory=dict)

    def loads(self, args: argparse.Namespace) -> list[Load]:
        """What to measure; those at one rate of a stream are neighbours."""
        if args.quick:
            return [(2, 32)]
        return [*((streams, 128) for streams in args.streams), *self.long]

    def tps(self, load: Load) -> float:
        """Tokens/s of one stream."""
        return self.rate / load[0]


KINDS = (
    Kind("one token a response", 0, ((8, 1024),), {1: 1.49, 8: 1.9}),
    Kind("64000 tok/s made, ours joins", 64000),
)


@contextmanager
def sides(args: argparse.Namespace, tps: float) -> Iterator[dict[str, Server]]:
    """Servers to compare, warmed up; only our own engines join tokens that are late."""
    with ExitStack() as stack:
        running = {OURS: stack.enter_context(mock_server(tps=tps, environment=PATIENCE))}
        checkouts = {ORIGINAL: None}
        if args.original_checkout:
            checkouts[OWN] = args.original_checkout
        for name, checkout in checkouts.items():
            its = original_server(tps=tps, join=False, checkout=checkout, environment=PATIENCE)
            running[name] = stack.enter_context(its)
        for server in running.values():
            measure(server, {"prompt": "a", "max_tokens": 32}, 8, lenient=True)
        yield running


def compare(args: argparse.Namespace, kind: Kind) -> dict[tuple[str, Load], list[LoadCost]]:
    """Every load on every side, in turns."""
    found: dict[tuple[str, Load], list[LoadCost]] = {}
    rounds, seconds = (1, 0.0) if args.quick else (args.rounds, args.seconds)
    for tps, loads in itertools.groupby(kind.loads(args), kind.tps):
        with sides(args, tps) as running:
            for (load, _), (name, server) in itertools.product(
                itertools.product(loads, range(rounds)), running.items()
            ):
                streams, tokens = load
                inputs = {"prompt": "Tell me about the sea.", "max_tokens": tokens}
                cell = measure(server, inputs, streams, seconds, lenient=True, tokens=tokens)
                wave = cell.wave
                failed = f", {len(wave.failures)} failed" if wave.failures else ""
                rate = f"{wave.tokens_per_second:.0f} tok/s{failed}"
                say(f"{kind.name}, {streams} x {tokens}, {name}: {rate}")
                found.setdefault((name, load), []).append(cell)
    return found


def whole(cells: list[LoadCost]) -> list[LoadCost]:
    """Those without a failure, which says more of a side's rate than its failures; else all."""
    return [cell for cell in cells if not cell.wave.failures] or cells


def row(cells: list[LoadCost]) -> list[object]:
    """The middle one of the rounds that went well, and how many predictions failed in all."""
    failed = sum(len(cell.wave.failures) for cell in cells)
    asked = failed + sum(len(cell.wave.streams) for cell in cells)
    if failed == asked:
        return ["all failed", f"{failed} of {asked}"]
    ranked = sorted(whole(cells), key=lambda cell: cell.wave.tokens_per_second)
    middle = ranked[len(ranked) // 2]
    wave = middle.wave
    rate = [wave.tokens_per_second, f"{failed} of {asked}" if failed else "0"]
    return [*rate, wave.itl_ms(), wave.ttft_ms(), middle.us, *middle.costs(), middle.client]


def ratios(
    name: str, ours: list[LoadCost], theirs: list[LoadCost], what: str, target: Target
) -> Iterator[Figure]:
    """Ours beside the other side's, round by round; none where that one brought nothing.

    Rounds in which something failed count only if there is no other.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b.wave.tokens]
    pairs = [pair for pair in pairs if not any(cell.wave.failures for cell in pair)] or pairs
    if pairs:
        faster = [a.wave.tokens_per_second / b.wave.tokens_per_second for a, b in pairs]
        yield Figure(f"tok/s: ours / {name}, {what}", statistics.median(faster), "x", target)
        yield Figure(
            f"CPU: {name} / ours, {what}", statistics.median(b.us / a.us for a, b in pairs)
        )


def tell(found: dict[tuple[str, Load], list[LoadCost]], kind: Kind, report: Report) -> None:
    """Add a table, the figures and the failures of one kind of response."""
    columns = ("streams x tokens", "side", "tok/s", "failed", "p99 ITL ms", "TTFT ms")
    grid = Grid(kind.name, (*columns, "CPU us/token", *COSTS, "load client"))
    for (name, load), cells in found.items():
        at = f"{load[0]} x {load[1]}"
        what = f"{at}, {kind.name}"
        cell = row(cells)
        grid.add(at, name, *cell, *["-"] * (len(grid.columns) - 2 - len(cell)))
        failures = [failure for cell in cells for failure in cell.wave.failures]
        if failures:
            example = f"{failures[0]:.200}"
            report.notes.append(f"{name}, {what}: {len(failures)} failed, such as: {example}")
        if name != OURS:
            target = Target(kind.least.get(load[0], FASTER), least=True)
            report.figures += ratios(name, found[OURS, load], cells, what, target)
        elif load[0] == CHEAP_AT:
            cost = statistics.median(cell.us for cell in whole(cells))
            report.figures.append(
                Figure(f"CPU of all but the client, {what}", cost, "us/token", CHEAP)
            )
    report.grids.append(grid)
    report.notes += busy_notes(
        {f"{name}, {load[0]} streams, {kind.name}": cells for (name, load), cells in found.items()}
    )


def run(args: argparse.Namespace) -> Report:
    """Both kinds of response."""
    report = Report(
        "against_original", "through Cog and Triton, beside the original cog-triton's way"
    )
    for kind in KINDS[1:] if args.quick else KINDS:
        tell(compare(args, kind), kind, report)
        own = MockAlone(tps=kind.rate / CHEAP_AT).us(CHEAP_AT)
        report.notes.append(f"the mock alone takes {own:.1f} us/token: {kind.name}")
    report.notes += [
        INCLUDED,
        QUICK_ACKS,
        "ITL is from token to token, 0 between tokens of one read",
        "tokens of predictions that failed do not count to tok/s, and their CPU does; such a round"
        " is told only where each had some",
        "both sides stream live in the same way; the original's had an older Cog for that",
        "the original's way has one instance of pre- and postprocessing; with its 64 it is slower",
    ]
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="concurrency")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each load")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--original-checkout", type=Path, help="the original cog-triton's sources")


if __name__ == "__main__":
    main("against_original", __doc__, run, arguments)
