"""Decoder model of this family, its RoPE, and its parsing from a Hugging Face config.json.

OpenVINO's GGUF reader knows no RoPE scaling: it bakes ``theta ** (-2i/d)`` into the graph as
a constant. Scalings that only divide those frequencies, whatever the position, can therefore
be honoured by replacing that constant (`build.py`): ``linear`` and ``llama3``. The rest also scale
attention or depend on the length of the sequence, and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.build_scripts.openvino._gguf_file import Field, Tensor
from cog_triton.build_scripts.openvino._script import read_json
from cog_triton.errors import EngineIncompatible

Floats = npt.NDArray[np.float32]

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Hugging Face architecture -> GGUF architecture. GGUF has no mistral: it is a llama.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a model: its base, and the scaling (Hugging Face form) or None."""

    theta: float
    scaling: dict[str, Any] | None = None


def frequencies(theta: float, head_size: int) -> npt.NDArray[np.float64]:
    """Unscaled inverse frequencies, radians per position: shape [head_size / 2]."""
    exponents: npt.NDArray[np.float64] = np.arange(0, head_size, 2, dtype=np.float64) / head_size
    return np.asarray(theta**-exponents, dtype=np.float64)


def divisors(rope: Rope, head_size: int) -> Floats | None:
    """What scaling divides each inverse frequency by, [head_size / 2]; None if unscaled."""
    scaling = rope.scaling
    if scaling is None:
        return None
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return np.full(head_size // 2, factor, np.float32)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    turns = original * frequencies(rope.theta, head_size) / (2 * math.pi)
    # Llama 3.1: few turns over the original context are divided in full, many not at all.
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / (keep + (1.0 - keep) / factor), dtype=np.float32)


def _rope_of(config: dict[str, Any]) -> Rope:
    """Read ``rope_theta`` and ``rope_scaling`` / ``rope_parameters`` of a config.json.

    Raises:
        EngineIncompatible: a scaling this family cannot honour, or parameters that are missing
            or contradict each other; names the type and factor.
    """
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise EngineIncompatible("rope_scaling and rope_parameters disagree in config.json")
    if not isinstance(new or old or {}, dict):
        raise EngineIncompatible(f"rope_scaling {new or old!r} must be a mapping")
    given: dict[str, Any] = dict(new or old or {})
    defaults = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    above = {key: config[key] for key in defaults if key in config}
    if any(given.get(key, value) != value for key, value in above.items()):
        raise EngineIncompatible(f"rope_parameters {given} and {above} disagree in config.json")
    given = {**defaults, **above, **given}
    theta = positive(given, "rope_theta", kinds=(int, float))
    del given["rope_theta"]
    if (partial := given.pop("partial_rotary_factor")) != 1.0:
        raise EngineIncompatible(f"partial_rotary_factor {partial!r}: only 1.0 can be honoured")
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind == "default":
        if given:
            raise EngineIncompatible(f"rope_scaling without a type has {sorted(given)}")
        return Rope(float(theta))
    wanted = {"linear": ("factor",), "llama3": _LLAMA3}.get(kind)
    if wanted is None:
        raise EngineIncompatible(
            f"RoPE scaling {kind!r} (factor {given.get('factor')!r}) cannot be honoured by an "
            "OpenVINO engine: only 'linear' and 'llama3' can"
        )
    where = f"RoPE scaling {kind!r}: "
    numbers = {key: positive(given, key, kinds=(int, float), where=where) for key in wanted}
    scaling = {"rope_type": kind, **numbers}
    unknown = sorted(set(given) - set(wanted) - {"original_max_position_embeddings"})
    if unknown:
        raise EngineIncompatible(f"RoPE scaling {kind!r} has unknown parameters {unknown}")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise EngineIncompatible("RoPE scaling 'llama3': high_freq_factor <= low_freq_factor")
    return Rope(float(theta), scaling)


@dataclass(frozen=True)
class Model:
    """Hyperparameters of a model; sizes in elements."""

    architecture: str
    dtype: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    eos: tuple[int, ...]
    bos: int | None
    pad: int | None

    @property
    def gguf_architecture(self) -> str:
        return ARCHITECTURES[self.architecture]

    def special_ids(self) -> dict[str, Any]:
        """eos (a list if several), bos and pad ids, as configs write them."""
        eos: int | list[int] = self.eos[0] if len(self.eos) == 1 else list(self.eos)
        return {"bos_token_id": self.bos, "eos_token_id": eos, "pad_token_id": self.pad}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """GGUF name and shape (rows first) of every tensor the model must have."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (query, hidden),
            "attn_k.weight": (key, hidden),
            "attn_v.weight": (key, hidden),
            "attn_output.weight": (hidden, query),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
        }
        if self.gguf_architecture == "qwen2":
            layer |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
        if self.gguf_architecture == "qwen3":
            layer |= {f"attn_{one}_norm.weight": (self.head_size,) for one in "qk"}
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            found |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
        found["output_norm.weight"] = (hidden,)
        if not self.tied:
            found["output.weight"] = (self.vocab_size, hidden)
        return found

    def check_tensors(self, have: dict[str, tuple[int, ...]]) -> None:
        """Refuse tensors that are missing, unknown or misshapen.

        Raises:
            EngineIncompatible: names the first such tensor.
        """
        want = self.tensors()
        for name in sorted(want.keys() - have.keys()):
            raise EngineIncompatible(f"the model has no tensor {name}")
        for name in sorted(have.keys() - want.keys()):
            raise EngineIncompatible(
                f"tensor {name} has no place in a {self.architecture} engine and is not dropped"
            )
        for name, shape in want.items():
            if have[name] != shape:
                raise EngineIncompatible(
                    f"tensor {name} has shape {have[name]}, config says {shape}"
                )


@dataclass(frozen=True)
class Checkpoint:
    """A model as it is stored: `fields` and `tensors` are those of a GGUF file.

    `divisors` are what scaling divides each rotary frequency by, [head_size / 2], None without
    scaling; `tokenizer` is the text of tokenizer.json.
    """

    model: Model
    fields: Sequence[Field]
    tensors: Sequence[Tensor]
    divisors: Floats | None
    tokenizer: str
    tokenizer_config: dict[str, Any]


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
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise EngineIncompatible(
            f"architectures {names!r}: the openvino family builds {', '.join(ARCHITECTURES)}"
        )
    architecture = str(names[0])
    _refuse_unsupported(config, architecture)
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    kv_heads = positive(config, "num_key_value_heads", heads)
    head_size = positive(config, "head_dim", hidden // heads)
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
    return Model(
        architecture=architecture,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=positive(config, "vocab_size"),
        max_positions=positive(config, "max_position_embeddings"),
        norm_epsilon=positive(config, "rms_norm_eps", 1e-6, (float,)),
        rope=_rope_of(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos=eos,
        bos=bos[0] if bos else None,
        pad=pad[0] if pad else None,
    )


def _refuse_unsupported(config: dict[str, Any], architecture: str) -> None:
    """Refuse settings that OpenVINO's GGUF reader would ignore silently."""
    # qwen2 always has q, k and v biases; its config does not say so.
    off = {"mlp_bias": False, "attention_bias": False, "quantization_config": None}
    rules: dict[str, Any] = {"hidden_act": "silu", **off}
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


def positive(
    values: dict[str, Any],
    key: str,
    default: float | None = None,
    kinds: tuple[type, ...] = (int,),
    where: str = "config.json: ",
) -> Any:
    """The value of `key`, a number above 0 of one of `kinds`; `where` begins a refusal."""
    value: Any = default if values.get(key) is None else values[key]
    if type(value) not in kinds or not value > 0:
        rule = "a whole number" if kinds == (int,) else "a number"
        raise EngineIncompatible(f"{where}{key} {value!r} must be {rule} > 0")
    return value


def _ids(value: object, key: str) -> tuple[int, ...]:
    """One id or a list of ids, in order, without repeats."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise EngineIncompatible(f"{key} {value!r} must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))
