"""Pruned copies of PyTorch and vLLM, with device code for one GPU alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_FIND = """
import importlib.util, json, torch
where = {name: importlib.util.find_spec(name).origin for name in ("torch", "vllm")}
major, minor = torch.cuda.get_device_capability()
print(json.dumps({**where, "sm": 10 * major + minor}))
"""


def prune(python: Path, output: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Copy and prune what `python` imports as torch and vllm, for this machine's GPU.

    Returns the environment in which it imports the copies, and `cog-triton prune`'s report. What
    torch looks for beside itself is linked.
    """
    found = json.loads(_said([python, "-c", _FIND]).splitlines()[-1])
    packages = [Path(found[name]).parent for name in ("torch", "vllm")]
    command = ["-m", "cog_triton", "prune", f"--sm={found['sm']}", "--output", str(output)]
    report = _said([sys.executable, *command, "--json", "--measure", *map(str, packages)])
    for package in packages:
        for beside in package.parent.iterdir():
            link = output / beside.name
            if beside.name.endswith(".libs") or beside.name == "nvidia":
                link.exists() or link.symlink_to(beside)
    path = os.pathsep.join(filter(None, [str(output), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}, {"sm": found["sm"], **json.loads(report)}


def _said(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def imported(python: Path, environment: dict[str, str]) -> dict[str, str]:
    """Paths of the packages torch and vllm in `environment`."""
    told = _said([python, "-c", _FIND], {**os.environ, **environment})
    paths: dict[str, str] = json.loads(told.splitlines()[-1])
    return paths


def sizes(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Sizes in bytes of each pruned file: whole, freed, and under gzip -1."""
    names = ("size", "freed", "gzip_before", "gzip_after")
    return [
        {"file": Path(row["path"]).name, **{name: row[name] for name in names}}
        for row in report["files"]
        if row["action"] == "pruned"
    ]
