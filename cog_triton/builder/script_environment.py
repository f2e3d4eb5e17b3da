"""Environment variables that the scripts of a build run with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cog_triton
from cog_triton.system import isolated_python


def environment_of(python: str, cwd: Path) -> dict[str, str]:
    """Environment for `python`: ours, with this package importable and output unbuffered.

    Another Python than ours has packages of its own, and gets this package alone, through a
    link in `cwd`.
    """
    if python != sys.executable:
        return {**isolated_python.environment(cwd / "python"), "PYTHONUNBUFFERED": "1"}
    root = str(Path(cog_triton.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
