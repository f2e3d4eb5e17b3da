"""The environment that the scripts of a build run in."""

from __future__ import annotations

import os
from pathlib import Path

import cog_triton


def of_scripts() -> dict[str, str]:
    """Ours, with this package importable from the script, and output neither held nor coloured."""
    root = str(Path(cog_triton.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
