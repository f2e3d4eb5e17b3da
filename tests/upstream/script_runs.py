"""Runs of a tree's scripts, all in forks of one process (`conversions`)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstream.installation import Installation

from cog_triton.builder.options import argparse_shim
from cog_triton.builder.options.script_options import Options, Unreadable, from_argparse


@dataclass(frozen=True)
class Run:
    """A script with its arguments, and the file that its output goes to."""

    script: Path
    args: Mapping[str, object]
    log: Path


def cause_of(log: Path, sources: Path) -> str:
    """What a script said last, and the last line of `sources` in its trace."""
    text = log.read_text("utf-8", "replace").strip()
    last = text.rpartition("\n")[2].strip() or "it says nothing"
    frames = re.findall(rf'File "{re.escape(str(sources))}/(.+)", line (\d+)', text)
    return last if not frames else f"{last} ({frames[-1][0]}:{frames[-1][1]})"


def run(tree: Installation, runs: Sequence[Run]) -> list[int]:
    """Run scripts one after another; their exit codes."""
    return _in_forks(
        tree,
        [
            {
                "script": str(each.script),
                "args": [w for name, value in each.args.items() for w in (f"--{name}", str(value))],
                "log": str(each.log),
            }
            for each in runs
        ],
    )


def read_options(
    tree: Installation, scripts: Sequence[Path], scratch: Path
) -> list[Options | Unreadable]:
    """Read the options of `scripts` by their own argparse."""
    scratch.mkdir()
    results = [scratch / f"{index}.json" for index in range(len(scripts))]
    runs = [
        {"script": str(script), "options": str(result), "log": str(result.with_suffix(".log"))}
        for script, result in zip(scripts, results, strict=True)
    ]
    _in_forks(tree, runs)
    return [_options(result, tree.sources) for result in results]


def _options(result: Path, sources: Path) -> Options | Unreadable:
    if result.is_file() and result.stat().st_size:
        return from_argparse(json.loads(result.read_text("utf-8")))
    return Unreadable(cause_of(result.with_suffix(".log"), sources))


def _in_forks(tree: Installation, runs: list[dict[str, Any]]) -> list[int]:
    command = [tree.python, Path(__file__).with_name("conversions.py"), argparse_shim.__file__]
    done = subprocess.run(
        command, input=json.dumps(runs), stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[int] = json.loads(done.stdout)
    return found
