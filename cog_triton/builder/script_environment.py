"""The environment that the scripts of a build run in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cog_triton
from cog_triton.system import isolated_python


def of_scripts(python: str, cwd: Path) -> dict[str, str]:
    """Ours, with this package importable from the script, and output neither held nor coloured.

    Another Python than ours has packages of its own, and gets this package alone, through a
    link in `cwd`.
    """
    if python != sys.executable:
        return {**isolated_python.environment(cwd / "python"), "PYTHONUNBUFFERED": "1"}
    root = str(Path(cog_triton.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
