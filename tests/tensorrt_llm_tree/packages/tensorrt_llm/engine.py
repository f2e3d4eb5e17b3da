"""A checkpoint -> an engine directory: config.json and rank{N}.engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import tensorrt_llm
from tensorrt_llm import fault_injection

_MAGIC = b"ftrt"


def read_checkpoint(directory: Path) -> dict[str, Any]:
    """Read the config of a checkpoint that has the files of all ranks."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    for rank in range(config["mapping"]["world_size"]):
        if not (directory / f"rank{rank}.safetensors").is_file():
            raise FileNotFoundError(f"{directory}/rank{rank}.safetensors does not exist")
    return config


def write(
    step: str, checkpoint: Path, target: Path, build_config: dict[str, Any], *, weights: bool = True
) -> None:
    """Build the engine of each rank; without `weights` it has none, and is to be refitted."""
    pretrained = read_checkpoint(checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "version": tensorrt_llm.__version__,
        "pretrained_config": pretrained,
        "build_config": build_config,
    }
    text = json.dumps(config, indent=4)
    (target / "config.json").write_text(text)
    for rank in range(pretrained["mapping"]["world_size"]):
        shard = (checkpoint / f"rank{rank}.safetensors").read_bytes()
        network = hashlib.sha256(text.encode() + bytes([rank])).digest()
        if not fault_injection.loses(step, rank):
            engine = _MAGIC + network + (shard if weights else b"")
            (target / f"rank{rank}.engine").write_bytes(engine)
            print(f"[TRT-LLM] [I] Serializing engine to {target}/rank{rank}.engine...", flush=True)
        fault_injection.between_files(step)


def refit(engine: bytes, shard: bytes) -> bytes:
    """Replace the weights of an engine."""
    if not engine.startswith(_MAGIC):
        raise RuntimeError("not an engine")
    return engine[: len(_MAGIC) + 32] + shard
