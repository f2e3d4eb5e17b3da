"""Memory sum of one GPU: weights, activations and runtime, and what is left for the KV cache.

Estimates before anything runs, by the shape of a model in its config.json: an engine tells what it
really has when it has loaded. The terms are those of TensorRT-LLM's page on memory usage and of
vLLM's start-up profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cog_triton.errors import BuildConfigInvalid
from cog_triton.sizing.gpu_table import Gpu

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "float8_e4m3fn": 1}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
GIB = 1 << 30
MAX_NUM_TOKENS = 8192
"""Tokens of one step: prompts are cut to it (chunked prefill)."""
_USED = 0.9  # share of a GPU's memory that engines take by default
_RUNTIME = int(0.9 * GIB)  # CUDA context, cuBLAS workspaces, CUDA graphs
_COMMUNICATION = int(0.5 * GIB)  # NCCL's and the custom all-reduce's buffers


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
    text = text_part(config)

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = text.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise BuildConfigInvalid(
                    f"{where}: {name}: {value!r}: must be a positive whole number"
                )
            return value
        if default is None:
            raise BuildConfigInvalid(
                f"{where}: {names[0]}: missing; it is no transformer's that memory can be"
                " summed for"
            )
        return default

    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else ""
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "n_heads")
    head = number("head_dim", default=max(1, hidden // heads))
    if latent := number("kv_lora_rank", default=0):
        kv_heads, kv_width = 1, latent + number("qk_rope_head_dim", default=0)
    else:
        fallback = 1 if text.get("multi_query") is True else heads
        kv_heads = number("num_key_value_heads", "n_head_kv", default=fallback)
        kv_width = 2 * head
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    return ModelShape(
        architecture=named if isinstance(named, str) else "",
        layers=number("num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        intermediate=number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        kv_width=kv_width,
        vocabulary=number("vocab_size"),
        experts=number("num_local_experts", "num_experts", "n_routed_experts", default=1),
        max_len=number(*_LENGTHS, default=2048),
        dtype=dtype if isinstance(dtype, str) and dtype in _BYTES else "bfloat16",
        quantized=method if isinstance(method, str) else None,
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json, with the part that describes the language model at its top."""
    for section in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(section), dict):
            return {**config, **config[section]}
    return config


@dataclass(frozen=True, slots=True)
class Precision:
    """Quantization: bytes of a weight in the layers, and of a number in the KV cache.

    `label` is the word in this project's configs; `weight` is None for weights as they are stored.
    `visible_loss`: answers get worse to a degree that users see.
    """

    label: str
    weight: float | None
    kv: int
    title: str
    visible_loss: bool = False


AS_STORED = Precision("none", None, 2, "weights as they are stored, 16-bit KV cache")
FP8 = Precision("fp8", 1.0, 1, "FP8 weights and KV cache")
INT8 = Precision("int8", 1.0, 2, "INT8 weights, 16-bit KV cache")
INT4_AWQ = Precision(
    "int4_awq", 0.5625, 2, "INT4 weights (AWQ), 16-bit KV cache", visible_loss=True
)
PRECISIONS = {one.label: one for one in (AS_STORED, FP8, INT8, INT4_AWQ)}


@dataclass(frozen=True, slots=True)
class MemorySum:
    """Memory of each of `gpus` GPUs, in bytes; `kv_per_token` is a token's part of the KV cache.

    `share` is the most of a GPU's memory that the engine takes.
    """

    gpu: Gpu
    gpus: int
    precision: Precision
    weights: int
    activations: int
    runtime: int
    kv_per_token: int
    share: float = _USED

    @property
    def usable(self) -> int:
        """What an engine takes of the GPU's memory."""
        free = self.gpu.memory if self.gpu.free is None else self.gpu.free
        return min(int(self.gpu.memory * self.share), free)

    @property
    def kv_cache(self) -> int:
        """What is left for the KV cache; negative if the weights do not fit."""
        return self.usable - self.weights - self.activations - self.runtime

    @property
    def kv_tokens(self) -> int:
        """Tokens of all sequences together that the KV cache holds."""
        return max(0, self.kv_cache) // self.kv_per_token

    def lines(self) -> list[str]:
        """The sum, line by line, in GiB."""
        return [
            f"{self.usable / GIB:6.1f} GiB of {self.gpu.memory / GIB:.1f} are used"
            f" ({self.usable / self.gpu.memory:.0%} of {self.gpu.name})",
            f"{-self.weights / GIB:6.1f} weights"
            + (f", 1/{self.gpus} of them" if self.gpus > 1 else ""),
            f"{-self.activations / GIB:6.1f} activations and logits of a step",
            f"{-self.runtime / GIB:6.1f} CUDA, kernels, graphs"
            + (", NCCL" if self.gpus > 1 else ""),
            f"{self.kv_cache / GIB:6.1f} left for the KV cache: {self.kv_tokens} tokens of"
            f" {self.kv_per_token / 1024:.0f} KiB",
        ]


def memory_sum(
    shape: ModelShape,
    weight_bytes: int,
    gpu: Gpu,
    gpus: int,
    precision: Precision,
    share: float = _USED,
) -> MemorySum:
    """Sum for a model whose files have `weight_bytes`, split over `gpus` by tensor parallelism.

    Embeddings and the output layer keep their precision when the layers are quantized. The engine
    takes `share` of each GPU's memory.
    """
    outside = min(weight_bytes, 2 * shape.vocabulary * shape.hidden * shape.dtype_bytes)
    weights = weight_bytes
    if precision.weight is not None and shape.quantized is None:
        inside = (weight_bytes - outside) * precision.weight / shape.dtype_bytes
        weights = min(weight_bytes, outside + int(inside))
    step = MAX_NUM_TOKENS * (4 * shape.hidden + 2 * shape.intermediate // gpus) * 2
    logits = 2 * 256 * shape.vocabulary * 4
    return MemorySum(
        gpu=gpu,
        gpus=gpus,
        precision=precision,
        weights=-(-weights // gpus),
        activations=step + logits,
        runtime=_RUNTIME + (_COMMUNICATION if gpus > 1 else 0),
        kv_per_token=shape.kv_bytes_per_token(gpus, precision.kv),
        share=share,
    )
