"""Memory sum of one GPU: weights, activations and runtime, and what is left for the KV cache.

Estimates before anything runs: an engine tells what it really has when it has loaded. The terms
are those of TensorRT-LLM's page on memory usage and of vLLM's start-up profile.
"""

from __future__ import annotations

from dataclasses import dataclass

from cog_triton.sizing.gpu_table import Gpu
from cog_triton.sizing.model_shape import ModelShape

GIB = 1 << 30
MAX_NUM_TOKENS = 8192
"""Tokens of one step: prompts are cut to it (chunked prefill)."""
_USED = 0.9  # share of a GPU's memory that engines take by default
_RUNTIME = int(0.9 * GIB)  # CUDA context, cuBLAS workspaces, CUDA graphs
_COMMUNICATION = int(0.5 * GIB)  # NCCL's and the custom all-reduce's buffers


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
