"""An engine directory becomes engine.tar: with the config it was built from, and its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from cog_triton import engine_manifest, engine_tar
from cog_triton.build import stamps
from cog_triton.build.config import BuildConfig
from cog_triton.errors import BuildStepFailed

CONFIG_NAME = "build_config.yaml"


def write(config: BuildConfig, engine_dir: Path, staging: Path, output: Path) -> None:
    """Pack `engine_dir` with build_config.yaml and cog-triton.json into `output`.

    Args:
        staging: a scratch directory beside the engine; made afresh and removed.

    Raises:
        BuildStepFailed: the engine has no usable config.json.
    """
    described = _read_config(engine_dir / "config.json")
    limits = described["build_config"]
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        _link_tree(engine_dir, staging)
        text = config.to_yaml().encode()
        (staging / CONFIG_NAME).write_bytes(text)
        found = stamps.versions()
        names = {"cog_triton": "cog_triton", "openvino": "openvino"}
        names |= {"openvino_genai": "openvino-genai"}
        engine_manifest.create(
            staging,
            engine=described["engine"],
            model_id=config.model_id,
            config_sha256=hashlib.sha256(text).hexdigest(),
            versions={ours: found[theirs] for ours, theirs in names.items() if theirs in found},
            max_input_len=limits["max_input_len"],
            max_seq_len=limits["max_seq_len"],
            max_batch_size=limits["max_batch_size"],
        )
        engine_tar.pack(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text("utf-8"))
        keys = ("max_input_len", "max_seq_len", "max_batch_size")
        if all(isinstance(described["build_config"][key], int) for key in keys):
            return {"engine": "tensorrt_llm", **described}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildStepFailed(f"the engine's config.json cannot be used: {error!r}") from error
    raise BuildStepFailed(f"{path}: build_config needs whole numbers for {', '.join(keys)}")


def _link_tree(source: Path, target: Path) -> None:
    """The files of `source` in `target`, hard-linked where the file system can."""

    def link_or_copy(file: str, to: str) -> str:
        try:
            os.link(file, to)
        except OSError:  # no hard links here
            shutil.copyfile(file, to)
        return to

    shutil.copytree(source, target, copy_function=link_or_copy, dirs_exist_ok=True)
