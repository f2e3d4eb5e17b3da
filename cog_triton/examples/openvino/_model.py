"""Decoder model description of this family, independent of the source format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cog_triton.errors import EngineIncompatible
from cog_triton.examples.openvino._rope import Rope

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
