"""Engines of small random models, by `cog-triton build` with a tree's own scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import yaml
from upstream.families import EXAMPLES, arguments
from upstream.installation import ROOT, Installation

_LIMITS = {"max_batch_size": 4, "max_input_len": 32, "gemm_plugin": "float16"}


def build(tree: Installation, model: Path, family: str, tp: int) -> str:
    """Build engine.tar of a family's model on `tp` ranks; what is wrong, or nothing."""
    script = tree.converter(EXAMPLES[family])
    if script is None:
        return "no convert_checkpoint.py"
    told = subprocess.run(
        [tree.python, script, "--help"], capture_output=True, text=True, check=True
    ).stdout
    try:
        args = arguments(family, re.findall(r"--([\w-]+)", told), tp)
    except LookupError as error:
        return str(error)
    place = model.with_name(f"{family}-tp{tp}")
    place.mkdir()
    config = {
        "model_id": str(model),
        "example_name": EXAMPLES[family],
        "convert": {"script": script.name, "output_dir": "checkpoint", "args": args},
        "build": {
            "executable": "trtllm-build",
            "output_dir": "engine",
            "args": {"checkpoint_dir": "checkpoint", "output_dir": "engine", **_LIMITS},
        },
    }
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "cog_triton", "build", place / "config.yaml"]
    command += ["-o", place / "engine.tar", "--work-dir", place / "work"]
    with (place / "build.log").open("wb") as log:
        env = {**os.environ, **tree.environment}
        done = subprocess.run(command, env=env, cwd=ROOT, stdout=log, stderr=log)
    if done.returncode:
        lines = (place / "build.log").read_text("utf-8", "replace").strip().splitlines()
        coded = next((line for line in reversed(lines) if line.startswith("error: ")), "")
        return f"{coded} ... {lines[-1]}"[:300]
    return _wrong_of(place / "engine.tar", tree.version, tp)


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
