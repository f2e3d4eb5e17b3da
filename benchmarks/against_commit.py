"""This tree beside another commit: CPU a token, CPU a request and ITL, as ratios.

Both serve the mock with a step clock on this machine, at once, and are asked in turns by one load
client: machines and hours differ, so that only what is measured side by side can be compared. The
other commit's files go below .work/against, with an environment of its own (scripts/setup), once.

    make bench-against REF=HEAD~20          # without REF: the last release
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import _servers
from _load import Wave, busy_notes, wave
from _report import Figure, Grid, Report, main, say
from _resource_usage import spent
from _servers import CHAT, PREDICTIONS, Api, Server

ROOT = Path(__file__).parents[1]
HERE = "this tree"
_VERSION = re.compile(r"(?m)^## (\d+\.\d+\.\d+) - ")
_UNRELEASED = re.compile(r"(?m)^## Unreleased\s+[^#\s]")
STREAMS, TPS = 64, 100
PARTS = ("door", "server", "cog", "worker", "tritonserver", "stub ")
COSTS = ("door", "server", "cog", "worker", "triton", "stubs")
"""Columns of `LoadCost.costs`, beside a column of the whole."""
_TICK_S = 0.01
"""What the kernel counts CPU time in."""
MOST, OF_PREDICTIONS = 1.2, 1.6
"""CPU by the other's; predictions pass a process more than in 0.4.1."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `max_tokens` by `streams` users, for `seconds` or once."""

    name: str
    api: Api
    max_tokens: int
    streams: int = STREAMS
    seconds: float = 0.0


def loads(seconds: float) -> Iterator[Load]:
    """Streams, whose cost is that of their tokens, and short answers, whose cost is a request's."""
    for api in (CHAT, PREDICTIONS):
        yield Load(f"{api.name}, {STREAMS} x {TPS} tok/s", api, max(2, round(TPS * seconds)))
        yield Load(f"{api.name}, answers of 2 tokens", api, 2, 16, seconds)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """A wave and the CPU seconds that each part of the server used meanwhile."""

    wave: Wave
    cpu: Mapping[str, float]

    @property
    def us(self) -> float:
        """CPU microseconds a token, without the load client; at least one clock tick in all."""
        return 1e6 * max(sum(self.cpu.values()), _TICK_S) / self.wave.tokens

    def costs(self) -> list[float]:
        """CPU microseconds a token of each of `PARTS`; supervisors are left out."""
        return [
            1e6 * sum(used for name, used in self.cpu.items() if name.startswith(part))
            / self.wave.tokens
            for part in PARTS
        ]  # fmt: skip

    def figures(self) -> dict[str, float]:
        """What is compared, by name."""
        wave, cpu = self.wave, self.us * self.wave.tokens
        return {
            "CPU a token": self.us,
            "CPU an event": cpu / wave.events,
            "CPU a request": cpu / len(wave.streams),
            "ITL p50": wave.itl_ms(50),
            "ITL p99": wave.itl_ms(99),
            "TTFT p50": wave.ttft_ms(50),
        }


def measure(server: Server, load: Load) -> LoadCost:
    """Run a load and measure the server's CPU."""
    before, inputs = server.cpu_seconds(), {"max_tokens": load.max_tokens}
    done = wave(server.base(load.api), inputs, load.streams, load.seconds, api=load.api)
    return LoadCost(done, spent(before, server.cpu_seconds()))


def last_release() -> str:
    """The commit of the newest version in CHANGELOG.md, or of the one before if this tree is it."""
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = _VERSION.findall(changes)
    version = versions[0 if _UNRELEASED.search(changes) else min(1, len(versions) - 1)]
    tagged = ("rev-parse", "--verify", "--quiet", f"v{version}^{{commit}}")
    cut = ("log", "-1", "--format=%H", f"--grep=^Cut {re.escape(version)}$")
    for arguments in (tagged, cut):
        git = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
        if found := git.stdout.decode().strip():
            return found
    say(f"against_commit: {version}, the last release, is not in this clone: nothing is measured")
    raise SystemExit(0)


_HELD = ("CPU a token", "CPU a request")


def checkout(ref: str) -> Path:
    """Files of a commit, and their environment, below .work/against; made once for each."""
    commit = _git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").decode().strip()
    place = ROOT / ".work" / "against" / commit[:12]
    if not (place / "setup").is_file():
        say(f"unpacking {ref} ({commit[:12]})")
        place.mkdir(parents=True, exist_ok=True)
        files = _git("archive", commit)
        subprocess.run(["tar", "-x", "-C", str(place)], input=files, check=True)
        subprocess.run(["scripts/setup"], cwd=place, check=True)
        (place / "setup").touch()
    return place


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip() or "no such commit in this repository"
        raise SystemExit(f"against_commit: git {' '.join(arguments)}: {told}")
    return done.stdout


def run(args: argparse.Namespace) -> Report:
    """Measure every load in turns; which side begins alternates."""
    rounds, seconds = (1, 0.3) if args.quick else (args.rounds, args.seconds)
    ref = args.ref or last_release()
    place = checkout(ref)
    report = Report("against_commit", f"this tree beside {ref} ({place.name})")
    columns = (
        "",
        "side",
        "CPU us/token",
        *COSTS,
        "us/event",
        "us/request",
        "ITL ms: p50",
        "p99",
        "TTFT p50",
    )
    grid = Grid(f"medians of {rounds} rounds; ratios are of the pairs", columns)
    with ExitStack() as stack:
        sides = {
            HERE: stack.enter_context(_server()),
            ref: stack.enter_context(_server(place)),
        }
        for server, api in itertools.product(sides.values(), (PREDICTIONS, CHAT)):
            measure(server, Load("", api, 8, 8))  # warms up
        for load in loads(seconds):
            cells: dict[str, list[LoadCost]] = {name: [] for name in sides}
            for number in range(rounds):
                for name in list(sides)[:: -1 if number % 2 else 1]:
                    cell = measure(sides[name], load)
                    cells[name].append(cell)
                    say(f"{load.name}, {name}: {cell.us:.1f} us/token")
            for name, found in cells.items():
                grid.add(load.name, name, *_medians(found))
            report.figures += figures(load, cells)
            waves = {f"{load.name}, {n}": c.wave for n, found in cells.items() for c in found}
            report.notes += busy_notes(waves)
    report.grids.append(grid)
    return report


def _server(place: Path | None = None) -> AbstractContextManager[_servers.Server]:
    return _servers.mock_server(tps=TPS, step_clock=True, checkout=place)


def _medians(cells: list[LoadCost]) -> Iterator[float]:
    found = [cell.figures() for cell in cells]
    yield median(cell.us for cell in cells)
    yield from map(median, zip(*(cell.costs() for cell in cells), strict=True))
    for name in list(found[0])[1:]:
        yield median(one[name] for one in found)


def figures(load: Load, cells: dict[str, list[LoadCost]]) -> Iterator[Figure]:
    """Ratios of a load, this tree's by the other's of each round, with their spread in the name."""
    names: tuple[str, ...] = ("CPU a token", "CPU an event", "ITL p50", "ITL p99")
    if load.seconds:
        names = ("CPU a request", "TTFT p50")
    rounds = [
        (ours.figures(), theirs.figures()) for ours, theirs in zip(*cells.values(), strict=True)
    ]
    for name in names:
        if found := [ours[name] / theirs[name] for ours, theirs in rounds if theirs[name]]:
            spread = f"{min(found):.2f} to {max(found):.2f}"
            target = (MOST, OF_PREDICTIONS)[load.api is PREDICTIONS] if name in _HELD else None
            yield Figure(f"{load.name}: {name} ({spread})", median(found), "x", target)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", nargs="?", help="the other commit; by default the last release")
    parser.add_argument("--hold", action="store_true", help="fail when a target is missed")
    parser.add_argument("--seconds", type=float, default=5, help="of each load")
    parser.add_argument("--rounds", type=int, default=5, help="of both sides")


if __name__ == "__main__":
    found = main("against_commit", __doc__, run, arguments)
    if "--hold" in sys.argv and any(figure.verdict == "missed" for figure in found.figures):
        raise SystemExit("against_commit: a target is missed")
