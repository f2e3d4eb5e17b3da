"""The weights of a Hugging Face model by their names in a checkpoint, and how each is split."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorrt_llm.tensors import Tensor, joined, load

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")
_LLAMA = {
    "self_attn.o_proj.weight": ("attention.dense.weight", 1),
    "mlp.gate_proj.weight": ("mlp.fc.weight", 0),
    "mlp.up_proj.weight": ("mlp.gate.weight", 0),
    "mlp.down_proj.weight": ("mlp.proj.weight", 1),
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "post_attention_layernorm.weight": ("post_layernorm.weight", None),
}
_GPT2 = {
    "ln_1.weight": ("input_layernorm.weight", None),
    "ln_1.bias": ("input_layernorm.bias", None),
    "attn.c_proj.weight": ("attention.dense.weight", 1),
    "attn.c_proj.bias": ("attention.dense.bias", None),
    "ln_2.weight": ("post_layernorm.weight", None),
    "ln_2.bias": ("post_layernorm.bias", None),
    "mlp.c_fc.weight": ("mlp.fc.weight", 0),
    "mlp.c_fc.bias": ("mlp.fc.bias", 0),
    "mlp.c_proj.weight": ("mlp.proj.weight", 1),
    "mlp.c_proj.bias": ("mlp.proj.bias", None),
}


@dataclass(frozen=True)
class Weight:
    """Weight of stacked blocks, each split over the ranks along `axis`, or not."""

    blocks: tuple[Tensor, ...]
    axis: int | None = None

    def of_rank(self, rank: int, ranks: int) -> Tensor:
        return joined([block.part(self.axis, rank, ranks) for block in self.blocks])


def load_model(model_dir: Path) -> dict[str, Tensor]:
    """Load the tensors of all files of the model."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{model_dir} has no *.safetensors")
    return {name: tensor for file in files for name, tensor in load(file).items()}


def of_llama(model: dict[str, Tensor], config: dict[str, Any], tp: int) -> dict[str, Weight]:
    found = {"transformer.vocab_embedding.weight": Weight((model["model.embed_tokens.weight"],))}
    for layer in range(config["num_hidden_layers"]):
        before, after = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        projections = (model[f"{before}self_attn.{name}_proj.weight"] for name in "qkv")
        found[f"{after}attention.qkv.weight"] = Weight(tuple(projections), 0)
        for theirs, (ours, axis) in _LLAMA.items():
            found[after + ours] = Weight((model[before + theirs],), axis)
    found["transformer.ln_f.weight"] = Weight((model["model.norm.weight"],))
    head = model.get("lm_head.weight", model["model.embed_tokens.weight"])
    return {**found, "lm_head.weight": _head(head, tp)}


def of_gpt2(model: dict[str, Tensor], config: dict[str, Any], tp: int) -> dict[str, Weight]:
    model = {name.removeprefix("transformer."): tensor for name, tensor in model.items()}
    found = {
        "transformer.vocab_embedding.weight": Weight((model["wte.weight"],)),
        "transformer.position_embedding.weight": Weight((model["wpe.weight"],)),
    }
    for layer in range(config["n_layer"]):
        before, after = f"h.{layer}.", f"transformer.layers.{layer}."
        for kind in ("weight", "bias"):
            qkv = _out_first(model[f"{before}attn.c_attn.{kind}"])
            thirds = tuple(qkv.part(0, third, 3) for third in range(3))
            found[f"{after}attention.qkv.{kind}"] = Weight(thirds, 0)
        for theirs, (ours, axis) in _GPT2.items():
            found[after + ours] = Weight((_out_first(model[before + theirs]),), axis)
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = Weight((model[f"ln_f.{kind}"],))
    return {**found, "lm_head.weight": _head(model["wte.weight"], tp)}


def of_stage(weights: dict[str, Weight], stage: int, stages: int) -> Iterator[tuple[str, Weight]]:
    """Weights of one pipeline stage of `stages`; its layers are counted from 0."""
    layers = 1 + max(int(match[1]) for match in map(_LAYER.fullmatch, weights) if match)
    if layers % stages:
        raise ValueError(f"{layers} layers cannot be divided among {stages} pipeline stages")
    each = layers // stages
    for name, weight in weights.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            if int(match[1]) // each == stage:
                yield f"transformer.layers.{int(match[1]) % each}.{match[2]}", weight
        elif stage == (0 if "embedding" in name else stages - 1):
            yield name, weight


def _out_first(tensor: Tensor) -> Tensor:
    """Transpose: GPT-2 stores its matrices input first."""
    return tensor.transposed() if len(tensor.shape) == 2 else tensor


def _head(tensor: Tensor, tp: int) -> Weight:
    return Weight((tensor.padded(-(-tensor.shape[0] // tp) * tp),), 0)
