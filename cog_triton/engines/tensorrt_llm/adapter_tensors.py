"""LoRA adapters as TensorRT-LLM takes them: the tensors lora_weights and lora_config.

As TensorRT-LLM's examples/hf_lora_convert.py makes them: a row for each adapted module of each
layer, its lora_A and its scaled lora_B flat, one after the other, padded to the longest row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.artifact.lora_adapter import CONVERTED_FILES, LoRAAdapter, read_adapter
from cog_triton.engines.tensorrt_llm.adapter_modules import HF_MODULES, MODULE_IDS
from cog_triton.errors import EngineIncompatible

_IDS = {theirs: MODULE_IDS[ours] for ours, theirs in HF_MODULES.items()}


def load_tensors(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of the adapter in a directory, as `to_tensors`."""
    return to_tensors(read_adapter(directory))


def save_tensors(adapter: LoRAAdapter, directory: Path) -> None:
    """Write `to_tensors` of an adapter as hf_lora_convert.py does, for `load_tensors`."""
    tensors = to_tensors(adapter)
    for name, tensor in zip(CONVERTED_FILES, ("lora_weights", "lora_config"), strict=True):
        np.save(directory / name, tensors[tensor])


def rows_of(adapter: LoRAAdapter) -> list[tuple[int, int, int]]:
    """A row of lora_config for each module: its id, its layer and its rank.

    Raises E1305 for a module that TensorRT-LLM does not know.
    """
    rows = []
    for module in adapter.modules:
        if module.kind not in _IDS or module.layer is None:
            raise EngineIncompatible(f"{module.name}: TensorRT-LLM adapts {', '.join(_IDS)} only")
        rows.append((_IDS[module.kind], module.layer, module.rank))
    return rows


def to_tensors(adapter: LoRAAdapter) -> dict[str, npt.NDArray[Any]]:
    """lora_weights, FP16 [1, modules, length], and lora_config, INT32 [1, modules, 3].

    Raises E1305 for a module that TensorRT-LLM does not know, and for values beyond FP16.
    """
    rows: list[npt.NDArray[np.float16]] = []
    config = rows_of(adapter)
    for module in adapter.modules:
        down, up = module.down.floats(), module.up.floats() * np.float32(module.scale)
        with np.errstate(over="ignore"):
            row = np.concatenate([down.ravel(), up.ravel()]).astype(np.float16)
        if not np.isfinite(row).all():
            raise EngineIncompatible(f"{module.name}: has values that FP16 does not hold")
        rows.append(row)
    weights = np.zeros((1, len(rows), max(map(len, rows))), np.float16)
    for place, row in enumerate(rows):
        weights[0, place, : len(row)] = row
    return {"lora_weights": weights, "lora_config": np.array([config], np.int32)}
