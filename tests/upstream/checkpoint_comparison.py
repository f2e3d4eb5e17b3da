"""Comparison of a TensorRT-LLM checkpoint with the model that it was converted from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from upstream.checkpoint_tensors import Tensors, expected
from upstream.layer_names import LayerNames

ROPE = ("embed_positions", "embed_positions_for_gpt_attention", "rotary_inv_freq")
"""Constants of rotary positions, of the model or of each layer, that some releases keep."""
_OLD_NAMES = {
    "mlp.experts_weight_1": "mlp.fc.weight",  # until 0.9
    "mlp.experts_weight_2": "mlp.proj.weight",
}


def differences(names: LayerNames, model: Path, checkpoint: Path, tp: int) -> list[str]:
    """What is not as expected in the `tp` ranks of `checkpoint`; nothing if all tensors are equal.

    Equal is equal in each number: those of `random_models` lose nothing in float16.
    """
    config = json.loads((model / "config.json").read_text("utf-8"))
    source = load_file(model / "model.safetensors")
    ranks = sorted(path.name for path in checkpoint.glob("rank*.safetensors"))
    wanted = [f"rank{rank}.safetensors" for rank in range(tp)]
    found = [] if ranks == wanted else [f"ranks {ranks}, not {wanted}"]
    for rank, name in enumerate(wanted):
        if name in ranks:
            tensors = _renamed(load_file(checkpoint / name))
            constants = {key: tensors.pop(key) for key in [*tensors] if key.endswith(ROPE)}
            found += [f"{name}: {line}" for line in _rope(constants, config.get("rope_theta", 1e4))]
            ours = expected(names, source, config, rank, tp)
            found += [f"{name}: {line}" for line in compared(tensors, ours)]
    return found


def _renamed(tensors: Tensors) -> Tensors:
    for old, new in _OLD_NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def compared(tensors: Tensors, ours: Tensors) -> Iterator[str]:
    """Lines on the names that only one has, and on the tensors that are not equal."""
    for name in sorted(tensors.keys() | ours.keys()):
        if name not in tensors or name not in ours:
            yield f"{name} is {'missing' if name in ours else 'not of the model'}"
        elif tensors[name].shape != ours[name].shape:
            yield f"{name}: shape {tensors[name].shape}, not {ours[name].shape}"
        elif not np.array_equal(tensors[name], ours[name].astype(tensors[name].dtype)):
            wrong = int(np.sum(tensors[name] != ours[name]))
            yield f"{name}: {wrong} of {ours[name].size} numbers differ"


def _rope(constants: Tensors, base: float) -> Iterator[str]:
    """Compare the constants with the angles of rotary positions of `base`.

    ``embed_positions``, for attention without the plugin, is of base 10000 whatever `base` is.
    """
    for name, tensor in constants.items():
        if name.endswith(ROPE[2]):
            size = 2 * len(tensor)
            wanted = base ** (-np.arange(0, size, 2) / size)
        else:
            table = constants[name.removesuffix("_for_gpt_attention")]
            _, positions, size = table.shape
            flat = name.endswith(ROPE[1])
            its_base = base if flat else 1e4
            angles = np.outer(np.arange(positions), its_base ** (-np.arange(0, size, 2) / size))
            wanted = (
                np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(1, -1)
                if flat
                else np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[None]
            )
        if tensor.shape != wanted.shape or not np.allclose(tensor, wanted, atol=1e-4):
            yield f"{name}: not the rotary positions of base {base:g}"
