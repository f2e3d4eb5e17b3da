"""Engines of small random models, by `cog-triton build` with a tree's own scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from upstream.checkpoint_comparison import differences
from upstream.conversion_runs import Conversion
from upstream.families import EXAMPLES
from upstream.installation import ROOT, Installation
from upstream.layer_names import NAMES

_LIMITS = {"max_batch_size": 4, "max_input_len": 32, "gemm_plugin": "float16"}


@dataclass(frozen=True)
class Built:
    """An engine of a family's model on `tp` ranks; `problem` says what is wrong with it."""

    family: str
    tp: int
    problem: str = ""

    def __str__(self) -> str:
        return f"[build] {self.family}, tp {self.tp}: {self.problem or 'up to the compile'}"


def wanted(conversions: Sequence[Conversion]) -> list[Conversion]:
    """Of each family the conversion to the most ranks that the script made."""
    made = {c.family: c for c in sorted(conversions, key=lambda c: c.tp) if not c.stopped}
    return [*made.values()]


def build(tree: Installation, models: Path, output: Path, conversion: Conversion) -> Built:
    """Build the engine of a conversion's model, anew from the model on, into engine.tar."""
    family, tp = conversion.family, conversion.tp
    place = output / f"{family}-build"
    place.mkdir()
    config, tar = place / "config.yaml", place / "engine.tar"
    config.write_text(yaml.safe_dump(_config(conversion, models / family)))
    command = [
        sys.executable,
        "-m",
        "cog_triton",
        "build",
        config,
        "-o",
        tar,
        "--work-dir",
        place / "work",
    ]
    with (place / "build.log").open("wb") as log:
        env = {**os.environ, **tree.environment}
        done = subprocess.run(command, env=env, cwd=ROOT, stdout=log, stderr=log)
    if done.returncode:
        lines = (place / "build.log").read_text("utf-8", "replace").strip().splitlines()
        coded = next((line for line in reversed(lines) if line.startswith("error: ")), "")
        return Built(family, tp, f"{coded} ... {lines[-1]}"[:300])
    (checkpoint,) = (place / "work" / "steps").glob("*/checkpoint")
    problems = differences(NAMES[family], models / family, checkpoint, tp)
    if list(conversion.differences) != problems:
        return Built(family, tp, "its checkpoint is not that of the script alone")
    return Built(family, tp, _wrong_of(tar, tree.version, tp))


def _config(conversion: Conversion, model: Path) -> dict[str, Any]:
    inside = {str(model): "model", str(conversion.checkpoint): "checkpoint"}
    args = {name: inside.get(str(value), value) for name, value in conversion.args.items()}
    return {
        "model_id": str(model),
        "example_name": EXAMPLES[conversion.family],
        "convert": {
            "script": "convert_checkpoint.py",
            "output_dir": "checkpoint",
            "args": args,
        },
        "build": {
            "executable": "trtllm-build",
            "output_dir": "engine",
            "args": {"checkpoint_dir": "checkpoint", "output_dir": "engine", **_LIMITS},
        },
    }


def _wrong_of(tar: Path, version: str, tp: int) -> str:
    """What engine.tar lacks or has wrong; nothing if it is right."""
    with tarfile.open(tar) as file:
        names = set(file.getnames())
        member = file.extractfile("cog-triton.json")
        assert member is not None
        manifest = json.load(member)
    absent = {"config.json", *(f"rank{rank}.engine" for rank in range(tp))} - names
    if absent:
        return f"engine.tar lacks {', '.join(sorted(absent))}"
    if manifest["versions"].get("tensorrt_llm") != version:
        return f"the manifest's versions are {manifest['versions']}"
    wanted = {"world_size": tp, "max_batch_size": _LIMITS["max_batch_size"]}
    found = {name: manifest.get(name) for name in wanted}
    return "" if found == wanted else f"the manifest has {found}"
