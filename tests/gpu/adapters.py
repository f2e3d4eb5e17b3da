"""Random LoRA adapters for the small model, as PEFT writes them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 8
NAMES = ("one", "two")


def with_adapters(small: Path, directory: Path, arguments: Mapping[str, Any], extra: Path) -> Path:
    """The small model with `NAMES`, `arguments`, and the file `extra` beside."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(small, directory, copy_function=os.link)
    (directory / "model.json").unlink()
    lora = {"enable_lora": True, "max_loras": len(NAMES), "max_lora_rank": RANK}
    (directory / "model.json").write_text(json.dumps({**arguments, **lora}), "utf-8")
    config = json.loads((small / "config.json").read_text("utf-8"))
    for seed, name in enumerate(NAMES):
        _write(directory / f"adapter-{name}", config, seed)
    paths = {name: str(directory / f"adapter-{name}") for name in NAMES}
    (directory / "multi_lora.json").write_text(json.dumps(paths), "utf-8")
    shutil.copy(extra, directory)
    return directory


def _write(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    """An adapter of q_proj and o_proj in every layer, large enough to change the text."""
    directory.mkdir()
    hidden = config["hidden_size"]
    wide = config["num_attention_heads"] * config.get(
        "head_dim", hidden // config["num_attention_heads"]
    )
    chosen = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (into, out) in {"q_proj": (hidden, wide), "o_proj": (wide, hidden)}.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes = {"A": (RANK, into), "B": (out, RANK)}
            for side, shape in shapes.items():
                values = chosen.standard_normal(shape) * 0.05
                tensors[f"{name}.lora_{side}.weight"] = values.astype(np.float16)
    weights = directory / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    told = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "bias": "none",
        "target_modules": ["q_proj", "o_proj"], "base_model_name_or_path": "SmolLM2-135M-Instruct",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(told), "utf-8")
