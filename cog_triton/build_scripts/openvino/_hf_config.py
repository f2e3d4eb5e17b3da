"""Parsing of a Hugging Face config.json into `Model`; refuses what the engine would ignore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cog_triton.build_scripts.openvino import _model
from cog_triton.build_scripts.openvino._model import ARCHITECTURES, Model
from cog_triton.build_scripts.openvino._script import read_json
from cog_triton.errors import EngineIncompatible


def load(directory: Path) -> Model:
    """The model described by config.json and generation_config.json in `directory`.

    Raises:
        ModelUnavailable: a file is missing or broken.
        EngineIncompatible: an architecture or feature the engine does not honour.
    """
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    return parse(config, read_json(generation) if generation.is_file() else {})


def parse(config: dict[str, Any], generation: dict[str, Any]) -> Model:
    """As `load`, from the parsed files."""
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", heads)
    head_size = _count(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise EngineIncompatible(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if head_size % 2:
        raise EngineIncompatible(f"head_dim {head_size} must be even")
    eos = _ids(generation.get("eos_token_id", config.get("eos_token_id")), "eos_token_id")
    if not eos:
        raise EngineIncompatible("no eos_token_id: the engine would never stop")
    bos = _ids(config.get("bos_token_id", generation.get("bos_token_id")), "bos_token_id")
    pad = _ids(generation.get("pad_token_id", config.get("pad_token_id")), "pad_token_id")
    epsilon = config.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, float) or epsilon <= 0:
        raise EngineIncompatible(f"rms_norm_eps {epsilon!r} must be a number > 0")
    return Model(
        architecture=architecture,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=_count(config, "vocab_size"),
        max_positions=_count(config, "max_position_embeddings"),
        norm_epsilon=epsilon,
        rope=_model.parse(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos=eos,
        bos=bos[0] if bos else None,
        pad=pad[0] if pad else None,
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) == 1 and names[0] in ARCHITECTURES:
        return str(names[0])
    raise EngineIncompatible(
        f"architectures {names!r}: the openvino family builds {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(config: dict[str, Any], architecture: str) -> None:
    """Refuse settings that OpenVINO's GGUF reader would ignore silently."""
    rules = {"hidden_act": "silu", "quantization_config": None, "mlp_bias": False}
    # qwen2 always has q, k and v biases; its config does not say so.
    rules["attention_bias"] = False
    for key, allowed in rules.items():
        value = config.get(key, allowed)
        if value != allowed and not (value is None and allowed is False):
            raise EngineIncompatible(f"{key} {value!r}: only {allowed!r} can be honoured")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            raise EngineIncompatible(f"{key} {config[key]!r}: mixture-of-experts is not supported")
    kinds = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise EngineIncompatible(f"layer_types {sorted(set(kinds))}: only 'full_attention'")
    window, reach = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    in_use = config.get("use_sliding_window", not architecture.startswith("Qwen"))
    if window is not None and in_use and window < reach:
        raise EngineIncompatible(
            f"sliding_window {window} is in use (max_position_embeddings {reach}): "
            "the engine attends to everything"
        )


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineIncompatible(f"config.json: {key} {value!r} must be a whole number > 0")
    return value


def _ids(value: object, key: str) -> tuple[int, ...]:
    """One id or a list of ids, in order, without repeats."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise EngineIncompatible(f"{key} {value!r} must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))
