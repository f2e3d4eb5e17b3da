"""Shape of a model by its config.json: what its weights and its KV cache are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cog_triton.errors import BuildConfigInvalid

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "float8_e4m3fn": 1}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    Attributes:
        architecture: the class that config.json names, as ``LlamaForCausalLM``.
        kv_width: elements that a token has in the KV cache, per layer and head, key and value;
            with a latent cache (MLA) those that all heads share.
        kv_heads: heads of keys and values; 1 with a latent cache, which every GPU holds whole.
        max_len: tokens of a sequence.
        dtype: of the weights as they are stored, as ``bfloat16``.
        quantized: the method, if the weights are quantized already, as ``fp8`` or ``awq``.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    kv_width: int
    vocabulary: int
    experts: int
    max_len: int
    dtype: str
    quantized: str | None

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight as it is stored."""
        return _BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Number of weights, by the usual gated MLP; for a model of which the files are unknown."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * head * (self.heads + self.kv_heads)
        feed_forward = 3 * self.hidden * self.intermediate * self.experts
        return self.layers * (attention + feed_forward) + 2 * self.vocabulary * self.hidden

    def kv_bytes_per_token(self, gpus: int, element: int) -> int:
        """Bytes of a token in the KV cache of each of `gpus`, with `element` bytes a number."""
        return self.layers * -(-self.kv_heads // gpus) * self.kv_width * element


def read_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """Shape of the model of a config.json; `where` names it in errors.

    Raises:
        BuildConfigInvalid: names the key that is missing or no positive whole number.
    """
    text = _text_part(config)
    read = _Reader(text, where)
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else ""
    hidden = read.number("hidden_size", "n_embd", "d_model")
    heads = read.number("num_attention_heads", "n_head", "n_heads")
    head = read.number("head_dim", default=max(1, hidden // heads))
    if latent := read.number("kv_lora_rank", default=0):
        kv_heads, kv_width = 1, latent + read.number("qk_rope_head_dim", default=0)
    else:
        fallback = 1 if text.get("multi_query") is True else heads
        kv_heads = read.number("num_key_value_heads", "n_head_kv", default=fallback)
        kv_width = 2 * head
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    return ModelShape(
        architecture=named if isinstance(named, str) else "",
        layers=read.number("num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        intermediate=read.number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        kv_width=kv_width,
        vocabulary=read.number("vocab_size"),
        experts=read.number("num_local_experts", "num_experts", "n_routed_experts", default=1),
        max_len=read.number(*_LENGTHS, default=2048),
        dtype=dtype if isinstance(dtype, str) and dtype in _BYTES else "bfloat16",
        quantized=method if isinstance(method, str) else None,
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model; all of it where it is flat."""
    for section in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(section), dict):
            return {**config, **config[section]}
    return config


@dataclass(frozen=True, slots=True)
class _Reader:
    values: Mapping[str, Any]
    where: str

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise BuildConfigInvalid(
                    f"{self.where}: {name}: {value!r}: must be a positive whole number"
                )
            return value
        if default is None:
            raise BuildConfigInvalid(
                f"{self.where}: {names[0]}: missing; it is no transformer's that memory can be"
                " summed for"
            )
        return default
