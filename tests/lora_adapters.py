"""Small LoRA adapters as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN = 16


def adapter(
    directory: Path,
    rank: int = 4,
    *,
    modules: Iterable[str] = ("self_attn.q_proj",),
    layers: int = 1,
    hidden: int = HIDDEN,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    seed: int = 0,
    scale: float = 1.0,
    **config: Any,
) -> Path:
    """An adapter with random weights; `sizes` are (out, in) of modules that are not square."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        for module in modules:
            out, inner = (sizes or {}).get(module, (hidden, hidden))
            name = f"base_model.model.model.layers.{layer}.{module}"
            for side, shape in (("A", (rank, inner)), ("B", (out, rank))):
                values = random.standard_normal(shape, np.float32) * np.float32(scale)
                tensors[f"{name}.lora_{side}.weight"] = values
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module.rpartition(".")[2] for module in modules],
        "bias": "none",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory
