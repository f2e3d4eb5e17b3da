"""Packing and unpacking of engine.tar beside tar: the same tree by both, in turns.

Ours also hashes every file, and puts what it packs on the disk (fsync) before it gives it its name.
Prints MB of the tree per second, medians over the rounds and their ratios, and our peak of memory.

    .venv/bin/python benchmarks/engine_tar.py --size 2000
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# In a process of its own, for its peak of memory; the time is that of the call alone.
OURS = """
import json, sys, time
from pathlib import Path
from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.artifact.engine_manifest import Manifest

def describe(files):
    limits = {"max_input_len": 1, "max_seq_len": 2, "max_batch_size": 1}
    return Manifest(engine="tensorrt_llm", model_id="m", versions={}, files=files, **limits)

action, tar, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
started = time.perf_counter()
if action == "pack":
    engine_tar.pack(engine_manifest.files_of(directory), tar, describe)
else:
    engine_tar.unpack(tar, directory)
seconds = time.perf_counter() - started
(line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
print(json.dumps([seconds, int(line.split()[1]) * 1024]))
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A task for both; `{tar}` and `{dir}` in the shell's command are what it reads and writes."""

    title: str
    action: str
    suffix: str
    shell: str
    tool: str = "tar"

    @property
    def plain(self) -> bool:
        return self.suffix == ".tar"


CASES = (
    Case("tar cf", "pack", ".tar", "tar cf {tar} -C {dir} ."),
    Case("tar cf, sync", "pack", ".tar", "tar cf {tar} -C {dir} . && sync {tar}"),
    Case("tar xf", "unpack", ".tar", "tar xf {tar} -C {dir}"),
    Case("tar c | gzip -1", "pack", ".tar.gz", "tar c -C {dir} . | gzip -1 > {tar}", "gzip"),
    Case("tar xzf", "unpack", ".tar.gz", "tar xzf {tar} -C {dir}", "gzip"),
    Case("tar c | zstd -T0", "pack", ".tar.zst", "tar c -C {dir} . | zstd -qT0 > {tar}", "zstd"),
    Case("tar x --zstd", "unpack", ".tar.zst", "tar x --zstd -f {tar} -C {dir}", "zstd"),
)


def tree(path: Path, size: int) -> Path:
    """Write two ranks of incompressible bytes, as weights hardly compress."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    for rank in range(2):
        with (path / f"rank{rank}.engine").open("wb") as file:
            for _ in range(size // 2 >> 20):
                file.write(os.urandom(1 << 20))
    return path


def ours(case: Case, tar: Path, directory: Path) -> tuple[float, int]:
    """Run our side; returns seconds and peak memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", OURS, case.action, str(tar), str(directory)],
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def theirs(case: Case, tar: Path, directory: Path) -> tuple[float, int]:
    """Run the command-line tools; returns seconds."""
    directory.mkdir(exist_ok=True)
    started = time.perf_counter()
    subprocess.run(case.shell.format(tar=tar, dir=directory), shell=True, check=True)
    return time.perf_counter() - started, 0


def measure(case: Case, scratch: Path, rounds: int) -> tuple[list[tuple[float, float]], int] | None:
    """Seconds of both in each round, and our peak memory; None without the tools."""
    if shutil.which(case.tool) is None:
        return None
    source, out = scratch / "tree", scratch / "out"
    tar = scratch / f"engine{case.suffix}"
    if case.action == "unpack":
        ours(Case("", "pack", case.suffix, ""), tar, source)
    sides: list[Callable[[Case, Path, Path], tuple[float, int]]] = [ours, theirs]
    found, peak = [], 0
    for number in range(rounds):
        took = {}
        for side in sides if number % 2 else reversed(sides):
            if case.action == "pack":
                tar.unlink(missing_ok=True)
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # or one side would wait for what the other has written
            took[side], most = side(case, tar, source if case.action == "pack" else out)
            peak = max(peak, most)
        found.append((took[ours], took[theirs]))
        print(f"{case.title}: ours {took[ours]:.2f} s, {took[theirs]:.2f} s", file=sys.stderr)
    tar.unlink(missing_ok=True)
    return found, peak


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2000, help="MB of the tree")
    parser.add_argument("--rounds", type=int, default=7, help="of each side")
    parser.add_argument(
        "--compressed-rounds", type=int, default=1, help="of each side, gzip and zstd; 0: none"
    )
    parser.add_argument("--dir", type=Path, help="where to write (default: the temporary one)")
    args = parser.parse_args()
    table = Table(title=f"{args.size} MB, packed and unpacked by cog-triton and by the tools")
    table.add_column("against", no_wrap=True)
    for name in ("MB/s", "theirs", "ratio", "lowest", "highest", "peak MB"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        scratch = Path(name)
        tree(scratch / "tree", args.size * 1_000_000)
        for case in CASES:
            rounds = args.rounds if case.plain else args.compressed_rounds
            measured = measure(case, scratch, rounds) if rounds else None
            if measured is None:
                table.add_row(case.title, *["-"] * 6)
                continue
            pairs, peak = measured
            ratios = [other / own for own, other in pairs]
            table.add_row(
                case.title,
                *(
                    f"{args.size / statistics.median(side):.0f}"
                    for side in zip(*pairs, strict=True)
                ),
                *(f"{pick(ratios):.2f}" for pick in (statistics.median, min, max)),
                f"{peak / 1e6:.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
