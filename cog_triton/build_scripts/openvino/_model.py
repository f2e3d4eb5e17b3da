"""Decoder model description of this family, independent of the source format, with its RoPE.

OpenVINO's GGUF reader knows no RoPE scaling: it bakes ``theta ** (-2i/d)`` into the graph as
a constant. Scalings that only divide those frequencies, whatever the position, can therefore
be honoured by replacing that constant (`_ir`): ``linear`` and ``llama3``. The rest also scale
attention or depend on the length of the sequence, and are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
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
    turns = (
        float(scaling["original_max_position_embeddings"])
        * frequencies(rope.theta, head_size)
        / (2 * math.pi)
    )
    # Llama 3.1: few turns over the original context are divided in full, many not at all.
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / (keep + (1.0 - keep) / factor), dtype=np.float32)


def parse(config: dict[str, Any], default_theta: float = 10000.0) -> Rope:
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
    theta = given.pop("rope_theta", config.get("rope_theta", default_theta))
    if not isinstance(theta, int | float) or theta <= 0:
        raise EngineIncompatible(f"rope_theta {theta!r} must be a positive number")
    if config.get("rope_theta", theta) != theta:
        raise EngineIncompatible(
            f"rope_theta {config['rope_theta']!r} and rope_parameters.rope_theta {theta!r} disagree"
        )
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
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
    scaling = {"rope_type": kind, **{key: _positive(kind, key, given.get(key)) for key in wanted}}
    unknown = sorted(set(given) - set(wanted) - {"original_max_position_embeddings"})
    if unknown:
        raise EngineIncompatible(f"RoPE scaling {kind!r} has unknown parameters {unknown}")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise EngineIncompatible("RoPE scaling 'llama3': high_freq_factor <= low_freq_factor")
    return Rope(float(theta), scaling)


def _positive(kind: str, key: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise EngineIncompatible(f"RoPE scaling {kind!r}: {key} {value!r} must be a number > 0")
    return value


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

    def hf_config(self) -> dict[str, Any]:
        """The model as a Hugging Face config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.scaling,
            "tie_word_embeddings": self.tied,
            **self.special_ids(),
        }

    def special_ids(self) -> dict[str, Any]:
        """eos (a list if several), bos and pad ids, as configs write them."""
        eos: int | list[int] = self.eos[0] if len(self.eos) == 1 else list(self.eos)
        return {"bos_token_id": self.bos, "eos_token_id": eos, "pad_token_id": self.pad}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """GGUF name and shape (rows first) of every tensor the model must have."""
        hidden, query, inner = self.hidden_size, self.num_heads * self.head_size, "blk.{}."
        key = self.num_kv_heads * self.head_size
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (query, hidden),
            "attn_k.weight": (key, hidden),
            "attn_v.weight": (key, hidden),
            "attn_output.weight": (hidden, query),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (self.intermediate_size, hidden),
            "ffn_up.weight": (self.intermediate_size, hidden),
            "ffn_down.weight": (hidden, self.intermediate_size),
        }
        if self.gguf_architecture == "qwen2":
            layer |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
        if self.gguf_architecture == "qwen3":
            layer |= {"attn_q_norm.weight": (self.head_size,)}
            layer |= {"attn_k_norm.weight": (self.head_size,)}
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            found |= {inner.format(index) + name: shape for name, shape in layer.items()}
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
