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


def _in_forks(tree: Installation, runs: list[dict[str, Any]]) -> list[int]:
    command = [tree.python, Path(__file__).with_name("conversions.py")]
    done = subprocess.run(
        command, input=json.dumps(runs), stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[int] = json.loads(done.stdout)
    return found
