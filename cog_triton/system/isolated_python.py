"""Isolated Python environments: child processes see this package and nothing else of ours.

NVIDIA's container has TensorRT-LLM in an environment that pins numpy, transformers and fastapi.
Cog's wheels are in another, and must not be found from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import cog_triton

OWN_PACKAGES = ".cog-triton-packages"
"""File in a directory of packages that we have added to PYTHONPATH for our own Python."""
LINKS = ".cog-triton-python"
"""Directory that `environment_of` makes."""


def environment(link_dir: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`base` without our Python's directories; `link_dir` is filled with this package."""
    package = Path(cog_triton.__file__).resolve().parent
    link_dir.mkdir(parents=True, exist_ok=True)
    link = link_dir / "cog_triton"
    link.unlink(missing_ok=True)
    link.symlink_to(package)

    def others(variable: str) -> list[str]:
        ours = [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
        return [
            entry
            for entry in base.get(variable, "").split(os.pathsep)
            if entry
            and Path(entry) != package.parent
            and not (Path(entry) / OWN_PACKAGES).exists()
            and not any(Path(entry).is_relative_to(prefix) for prefix in ours)
        ]

    kept = {k: v for k, v in base.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    return {
        **kept,
        "PATH": os.pathsep.join(others("PATH")) or os.defpath,
        "PYTHONPATH": os.pathsep.join([str(link_dir), *others("PYTHONPATH")]),
    }


def environment_of(python: str, cwd: Path) -> dict[str, str]:
    """Environment for `python`: ours, with this package importable and output unbuffered.

    Another Python than ours has packages of its own, and gets this package alone, through a
    link in `cwd`.
    """
    if python != sys.executable:
        return {**environment(cwd / LINKS), "PYTHONUNBUFFERED": "1"}
    root = str(Path(cog_triton.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
