"""Command line of scripts/verify-image; imports only the standard library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import arguments

PHASES = ("assembled", "machine", "operations", "refusal", "checks", "small", "bench",
          "bench-python", "start")  # fmt: skip
_ABOUT = """\
Check and measure a vLLM image, and the same wheels without pruning, on this machine's GPU.

assembled   every file of the image made here has the hash in the image's list
machine     what all of it runs on
operations  single operations give the same bits over the image's libraries and the whole ones
refusal     started for another GPU, the image refuses (E1305)
checks      two models served by its entry point, each through all checks, and a crash
small       beside vllm serve of the whole wheels, with its front ends in Python and in Rust
bench       the same with a model of 8B and the Rust front end
bench-python  the same with the Python one
start       seconds to READY and to the first token: first, again, without bytecode

many, kill, pair, abilities and peer of scripts/verify-gpu --help only if they are named.

ROOT is where scripts/setup-image unpacks. Results are in ROOT/results.json, samples.json and
results.md after each step, and in $OUT if that is set. Exit code 0 only if every check held."""


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `given`, else sys.argv; exits with 2 and the reason where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/verify-image",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    arguments.add_measures(parser, PHASES, arguments.ONLY_BY_NAME)
    parser.add_argument("--root", type=Path, default=Path("/root/image"), metavar="ROOT")
    parser.add_argument("--newer-source", action="store_true",
                        help="lay this tree's source over the image's own layer first")  # fmt: skip
    parser.add_argument("--read-only", action="store_true", help="root file systems are read-only")
    return parser.parse_args(given)


if __name__ == "__main__":
    print(parse().root)
