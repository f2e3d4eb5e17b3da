"""A model in a GGUF file; metadata that the engine would ignore is refused by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cog_triton.build_scripts.openvino import _gguf_file, _tokenizer
from cog_triton.build_scripts.openvino._model import (
    ARCHITECTURES,
    Checkpoint,
    Model,
    Rope,
    divisors,
    positive,
)
from cog_triton.errors import EngineIncompatible, ModelUnavailable

_HF_NAMES = {gguf: name for name, gguf in reversed(ARCHITECTURES.items())}
# Every `<architecture>.*` key this family understands; any other is refused by name.
_KNOWN = (
    "block_count context_length embedding_length feed_forward_length attention.head_count"
    " attention.head_count_kv attention.key_length attention.value_length"
    " attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type"
    " rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned"
    " vocab_size"
)


def find(source: Path) -> Path | None:
    """The GGUF file that `source` is or holds; None for a Hugging Face directory.

    Raises:
        ModelUnavailable: neither, or more than one GGUF file.
    """
    if source.is_file():
        return source
    if (source / "config.json").is_file():
        return None
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ModelUnavailable(
            f"{source}: wanted a .gguf file, a directory with one .gguf file "
            f"(it has {len(found)}), or a directory with config.json"
        )
    return found[0]


def read(path: Path) -> Checkpoint:
    """The model in a GGUF file.

    Raises:
        ModelUnavailable: the file cannot be read.
        EngineIncompatible: an architecture or feature the engine does not honour.
    """
    entries, tensors = _gguf_file.read(path)
    fields = {entry.key: entry.value for entry in entries}
    by_name = {tensor.name: tensor for tensor in tensors}
    table = by_name.pop("rope_freqs.weight", None)
    if fields.get("split.count", 1) != 1:
        raise EngineIncompatible(f"{path.name}: a split GGUF; merge its parts first")
    model = _model_of(fields, "output.weight" not in by_name, table is not None)
    model.check_tensors({name: tensor.shape for name, tensor in by_name.items()})
    divided = divisors(model.rope, model.head_size) if table is None else table.floats()
    tokenizer = _tokenizer.rebuild(fields).to_str(pretty=True)
    config = _tokenizer.config_of(fields, model.max_positions)
    return Checkpoint(model, entries, tensors, divided, tokenizer, config)


def _model_of(fields: dict[str, Any], tied: bool, has_table: bool) -> Model:
    """The model that metadata describe; `has_table` of divisors of its rotary frequencies."""
    name = str(fields.get("general.architecture"))
    if name not in _HF_NAMES:
        raise EngineIncompatible(
            f"GGUF architecture {name!r}: the openvino family builds {', '.join(_HF_NAMES)}"
        )
    own = {k[len(name) + 1 :]: v for k, v in fields.items() if k.startswith(f"{name}.")}
    for key in sorted(own.keys() - set(_KNOWN.split())):
        raise EngineIncompatible(f"GGUF key {name}.{key} ({own[key]!r}) cannot be honoured")

    def count(key: str, default: int | None = None) -> int:
        return int(positive(own, key, default, where=f"GGUF key {name}."))

    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_size = count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count(key, head_size) != head_size:
            raise EngineIncompatible(f"GGUF key {name}.{key} {own[key]} is not {head_size}")
    return Model(
        architecture=_HF_NAMES[name],
        dtype="float16",
        num_layers=count("block_count"),
        hidden_size=hidden,
        intermediate_size=count("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=count("attention.head_count_kv", heads),
        head_size=head_size,
        vocab_size=len(fields.get("tokenizer.ggml.tokens", ())),
        max_positions=count("context_length"),
        norm_epsilon=_shortest(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope_of(name, own, has_table),
        tied=tied,
        eos=_stop_ids(fields),
        bos=fields.get("tokenizer.ggml.bos_token_id"),
        pad=fields.get("tokenizer.ggml.padding_token_id"),
    )


def _rope_of(name: str, own: dict[str, Any], has_table: bool) -> Rope:
    theta = _shortest(own.get("rope.freq_base", 10000.0))
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 1.0)
    if kind == "linear" and not has_table:
        return Rope(theta, {"rope_type": "linear", "factor": _shortest(factor)})
    if kind != "none":
        raise EngineIncompatible(
            f"RoPE scaling {kind!r} (factor {factor!r}) cannot be honoured by an OpenVINO engine: "
            f"{name}.rope.scaling.type may be 'none' or 'linear'"
        )
    # A GGUF keeps only the divisors of a llama3 scaling, not the numbers they came from.
    return Rope(theta, {"rope_type": "llama3", "factors": "rope_freqs"} if has_table else None)


def _stop_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [fields[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in fields]
    if not found:
        raise EngineIncompatible("the GGUF has no eos_token_id: the engine would never stop")
    return tuple(dict.fromkeys(found))


def _shortest(value: object) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))  # type: ignore[arg-type]
