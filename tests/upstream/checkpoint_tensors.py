"""Expected tensors of a TensorRT-LLM checkpoint, computed from those of transformers' model.

The rules, which docs/build-options.md tells: names change (`layer_names`); queries, keys and values
become one matrix, each rank's own heads of each; what widens (fc, gate, lm_head) is cut into ranks
along its outputs, what narrows (dense, proj) along its inputs, and its bias stays whole; all else
is on every rank. The head is padded with zeros until the ranks divide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from upstream.layer_names import LayerNames

Array = NDArray[Any]
Tensors = dict[str, Array]
_BY_OUTPUT = ("mlp.fc", "mlp.gate", "lm_head")
_BY_INPUT = ("attention.dense", "mlp.proj")


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model: of queries, of keys and values."""

    queries: int
    keys: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Heads:
        """Heads as a ``config.json`` of transformers has them."""
        queries = config.get("num_attention_heads") or config["n_head"]
        keys = 1 if config.get("multi_query") and "num_kv_heads" not in config else queries
        return cls(queries, config.get("num_key_value_heads") or config.get("num_kv_heads") or keys)


def expected(
    names: LayerNames, model: Tensors, config: Mapping[str, Any], rank: int, tp: int
) -> Tensors:
    """The tensors of `rank` of `tp`, without the constants of positions."""
    count = config.get("num_hidden_layers") or config["n_layer"]
    found = dict(_part(names.top, names, model, "", "", rank, tp))
    if "lm_head.weight" not in found:
        embedding = "transformer.vocab_embedding.weight"
        head = "lm_head.weight" if names.has_head else embedding
        found[head] = _cut("lm_head", found[embedding], rank, tp)
    if names.skipped_positions:
        name = "transformer.position_embedding.weight"
        found[name] = found[name][names.skipped_positions :]
    heads = Heads.of(config)
    for index in range(count):
        source, target = f"{names.layers}.{index}.", f"transformer.layers.{index}."
        found.update(_part(names.layer, names, model, source, target, rank, tp))
        for kind in ("weight", "bias"):
            parts = [model.get(f"{source}{name}.{kind}") for name in names.qkv]
            given = [part for part in parts if part is not None]
            if given:
                three = split_qkv(given, names, heads)
                found[f"{target}attention.qkv.{kind}"] = _joined_qkv(three, heads, rank, tp)
        if names.experts:
            experts = config["num_local_experts"]
            found.update(_experts(names, model, source, target, experts, rank, tp))
    return found


def _part(
    wanted: dict[str, str],
    names: LayerNames,
    model: Tensors,
    source: str,
    target: str,
    rank: int,
    tp: int,
) -> Iterator[tuple[str, Array]]:
    for ours, theirs in wanted.items():
        for kind in ("weight", "bias"):
            tensor = model.get(f"{source}{theirs}.{kind}")
            if tensor is None:
                continue
            if names.transposed and source and tensor.ndim == 2:
                tensor = tensor.T
            if kind == "weight" and (ours.endswith("layernorm") or ours.endswith("ln_f")):
                tensor = tensor + np.asarray(names.norm_offset, tensor.dtype)
            if names.summed_bias and rank and (ours, kind) == ("mlp.proj", "bias"):
                tensor = np.zeros_like(tensor)
            yield f"{target}{ours}.{kind}", _cut(ours, tensor, rank, tp)


def _cut(name: str, tensor: Array, rank: int, tp: int) -> Array:
    """The part of `tensor`, a weight or bias of `name`, that `rank` has."""
    if name in _BY_OUTPUT:
        missing = -len(tensor) % tp
        padded = np.pad(tensor, [(0, missing), *[(0, 0)] * (tensor.ndim - 1)])
        return np.split(padded, tp)[rank]
    if name in _BY_INPUT and tensor.ndim == 2:
        return np.split(tensor, tp, axis=1)[rank]
    return tensor


def split_qkv(parts: list[Array], names: LayerNames, heads: Heads) -> list[Array]:
    """Queries, keys and values of all heads, each head after head, from what the model has."""
    if names.qkv_order == "separate":
        return parts
    tensor = parts[0].T if names.transposed else parts[0]
    rest = tensor.shape[1:]
    if names.qkv_order == "joined":
        size = len(tensor) // (heads.queries + 2 * heads.keys)
        ends = [heads.queries * size, (heads.queries + heads.keys) * size]
        return np.split(tensor, ends)
    groups = heads.queries if names.qkv_order == "by_head" else heads.keys
    each = heads.queries // groups
    grouped = tensor.reshape(groups, each + 2, -1, *rest)
    three = (grouped[:, :each], grouped[:, each], grouped[:, each + 1])
    return [part.reshape(-1, *rest) for part in three]


def _joined_qkv(three: list[Array], heads: Heads, rank: int, tp: int) -> Array:
    """Those of the heads of `rank`; a head of keys that ranks share is on each of them."""
    copies = max(1, tp // heads.keys)
    queries, keys, values = three
    shared = [np.split(part, tp // copies)[rank // copies] for part in (keys, values)]
    return np.concatenate([np.split(queries, tp)[rank], *shared])


def _experts(
    names: LayerNames, model: Tensors, source: str, target: str, count: int, rank: int, tp: int
) -> Tensors:
    """Experts one upon another: w3 above w1 as fc, w2 as proj."""

    def stacked(name: str, axis: int) -> Array:
        all_of = [model[f"{source}{names.experts[name].format(i)}.weight"] for i in range(count)]
        return np.stack([np.split(each, tp, axis=axis)[rank] for each in all_of])

    return {
        f"{target}mlp.fc.weight": np.concatenate([stacked("w3", 0), stacked("w1", 0)], axis=1),
        f"{target}mlp.proj.weight": stacked("w2", 1),
    }
