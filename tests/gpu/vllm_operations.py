"""Operations that call vLLM's kernels in its libraries, without vLLM's Python package.

Signatures are those that the libraries of vLLM 0.33 register with PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch_operations import Inputs, Operation, bf16, f16, f32

LIBRARIES = {
    "_C": "_C_stable_libtorch.abi3.so",
    "_moe_C": "_moe_C_stable_libtorch.abi3.so",
    "_vllm_fa2_C": "vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "_vllm_fa3_C": "vllm_flash_attn/_vllm_fa3_C.abi3.so",
}
fp8 = torch.float8_e4m3fn


def load(directory: Path) -> None:
    """Load those of the libraries that are in `directory`."""
    for name in LIBRARIES.values():
        if (directory / name).exists():
            torch.ops.load_library(directory / name)


def arity(operation: Any) -> int:
    """Number of an operation's arguments."""
    return len(operation.default._schema.arguments)


def empty(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def gated(name: str, dtype: torch.dtype, *more: float) -> Operation:
    def run(m: Inputs) -> Any:
        out = empty(37, 512, dtype=dtype)
        getattr(torch.ops._C, name)(out, m.normal(37, 1024, dtype=dtype), *more)
        return out

    return run


def activation(name: str) -> Operation:
    def run(m: Inputs) -> Any:
        out = empty(37, 512)
        getattr(torch.ops._C, name)(out, m.normal(37, 512, dtype=bf16))
        return out

    return run


def rms_norm(m: Inputs) -> Any:
    out = empty(33, 1024)
    torch.ops._C.rms_norm(out, m.normal(33, 1024, dtype=bf16), m.normal(1024, dtype=bf16), 1e-6)
    return out


def fused_add_rms_norm(m: Inputs) -> Any:
    x, residual = m.normal(33, 1024, dtype=f16), m.normal(33, 1024, dtype=f16)
    torch.ops._C.fused_add_rms_norm(x, residual, m.normal(1024, dtype=f16), 1e-6)
    return x, residual


def rms_norm_fp8(m: Inputs) -> Any:
    out, x, weight = empty(33, 1024, dtype=fp8), m.normal(33, 1024, dtype=bf16), ones(1024).to(bf16)
    torch.ops._C.rms_norm_static_fp8_quant(out, x, weight, ones(1) / 8, 1e-6)
    return out


def rms_norm_dynamic(m: Inputs) -> Any:
    out, scales = empty(33, 1024, dtype=fp8), empty(33, 1, dtype=f32)
    x, weight = m.normal(33, 1024, dtype=bf16), m.normal(1024, dtype=bf16)
    torch.ops._C.rms_norm_dynamic_per_token_quant(out, x, weight, scales, 1e-6, None, None)
    return out, scales


def rotary_embedding(neox: bool) -> Operation:
    def run(m: Inputs) -> Any:
        query, key = m.normal(21, 8 * 128, dtype=bf16), m.normal(21, 2 * 128, dtype=bf16)
        table = m.normal(512, 128, dtype=bf16)
        torch.ops._C.rotary_embedding(m.integers(512, 21), query, key, 128, table, neox)
        return query, key

    return run


def reshape_and_cache_flash(m: Inputs) -> Any:
    keys, values = empty(8, 16, 2, 128), empty(8, 16, 2, 128)
    slots = torch.arange(3, 24, device="cuda")
    new = [m.normal(21, 2, 128, dtype=bf16) for _ in range(2)]
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        *new, keys, values, slots, "auto", ones(1), ones(1)
    )
    return keys, values


def reshape_and_cache_fp8(m: Inputs) -> Any:
    keys, values = (empty(8, 2, 8, 16, 16, dtype=torch.uint8) for _ in range(2))
    values = values.view(8, 2, 128, 16)
    slots = torch.arange(3, 24, device="cuda")
    new = [m.normal(21, 2, 128, dtype=bf16) for _ in range(2)]
    torch.ops._C_cache_ops.reshape_and_cache(*new, keys, values, slots, "fp8", ones(1), ones(1))
    return keys, values


def concat_and_cache_mla(m: Inputs) -> Any:
    cache, slots = empty(4, 16, 576), torch.arange(5, 26, device="cuda")
    parts = m.normal(21, 512, dtype=bf16), m.normal(21, 64, dtype=bf16)
    torch.ops._C_cache_ops.concat_and_cache_mla(*parts, cache, slots, "auto", ones(1))
    return cache


def static_fp8(m: Inputs) -> Any:
    out = empty(33, 512, dtype=fp8)
    torch.ops._C.static_scaled_fp8_quant(out, m.normal(33, 512, dtype=bf16), ones(1) / 4, None)
    return out


def dynamic_fp8(m: Inputs) -> Any:
    out, scale = empty(33, 512, dtype=fp8), empty(1, dtype=f32)
    torch.ops._C.dynamic_scaled_fp8_quant(out, m.normal(33, 512, dtype=bf16), scale)
    return out, scale


def per_token_fp8(m: Inputs) -> Any:
    out, scale = empty(33, 512, dtype=fp8), empty(33, 1, dtype=f32)
    x = m.normal(33, 512, dtype=bf16)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(out, x, scale, None)
    return out, scale


def per_group_fp8(m: Inputs) -> Any:
    out, scale = empty(33, 512, dtype=fp8), empty(33, 4, dtype=f32)
    x = m.normal(33, 512, dtype=bf16)
    torch.ops._C.per_token_group_fp8_quant(
        x, out, scale, 128, 1e-10, -448.0, 448.0, False, False, False
    )
    return out, scale


def dynamic_int8(m: Inputs) -> Any:
    out, scale = empty(33, 512, dtype=torch.int8), empty(33, 1, dtype=f32)
    torch.ops._C.dynamic_scaled_int8_quant(out, m.normal(33, 512, dtype=bf16), scale, None)
    return out, scale


def cutlass_fp8(m: Inputs) -> Any:
    out, a, b = empty(64, 256), m.normal(64, 512).to(fp8), m.normal(256, 512).to(fp8).T
    torch.ops._C.cutlass_scaled_mm(out, a, b, ones(1), ones(1), None)
    return out


def cutlass_int8(m: Inputs) -> Any:
    a = m.integers(127, 64, 512, low=-127, dtype=torch.int8)
    b = m.integers(127, 256, 512, low=-127, dtype=torch.int8).T
    out = empty(64, 256)
    torch.ops._C.cutlass_scaled_mm(out, a, b, ones(64, 1) / 64, ones(1, 256), None)
    return out


def repetition_penalties(m: Inputs) -> Any:
    logits, masks = m.normal(5, 4000), [m.normal(5, 4000) > 1 for _ in range(2)]
    torch.ops._C.apply_repetition_penalties_(logits, *masks, m.normal(5).abs() + 1)
    return logits


def merge_attn_states(m: Inputs) -> Any:
    out, lse = empty(21, 8, 128), empty(8, 21, dtype=f32)
    states = [(m.normal(21, 8, 128, dtype=bf16), m.normal(8, 21)) for _ in range(2)]
    torch.ops._C.merge_attn_states(out, lse, *states[0], *states[1], None, None)
    return out, lse


def awq_dequantize(m: Inputs) -> Any:
    packed = m.integers(2**31, 256, 32, dtype=torch.int32)
    zeros = m.integers(2**31, 2, 32, dtype=torch.int32)
    return torch.ops._C.awq_dequantize(packed, m.normal(2, 256, dtype=f16), zeros, 0, 0, 0)


def marlin_repack(m: Inputs) -> Any:
    repack, packed = torch.ops._C.gptq_marlin_repack, m.integers(2**31, 32, 128, dtype=torch.int32)
    order = [empty(0, dtype=torch.int32)] * (arity(repack) - 5)  # until 0.26
    return repack(packed, *order, 256, 128, 4, False)


def hadamard(m: Inputs) -> Any:
    return torch.ops._C.hadacore_transform(m.normal(16, 512, dtype=bf16), False)


def topk_softmax(m: Inputs) -> Any:
    weights = empty(40, 4, dtype=f32)
    ids, tokens = (empty(40, 4, dtype=torch.int32) for _ in range(2))
    route = torch.ops._moe_C.topk_softmax
    optional = [None] * (arity(route) - 5)
    route(weights, ids, tokens, m.normal(40, 64), True, *optional)
    return weights, ids


def grouped_topk(m: Inputs) -> Any:
    return torch.ops._moe_C.grouped_topk(m.normal(40, 256), 8, 4, 8, True, 2.5, m.normal(256), 1)


def moe_align(m: Inputs) -> Any:
    ids = m.integers(16, 40, 4, dtype=torch.int32)
    made = empty(400, dtype=torch.int32), empty(25, dtype=torch.int32), empty(1, dtype=torch.int32)
    torch.ops._moe_C.moe_align_block_size(ids, 16, 16, *made, None)
    _, experts, count = made
    return experts[: int(count) // 16], count


def moe_sum(m: Inputs) -> Any:
    out = empty(40, 512)
    torch.ops._moe_C.moe_sum(m.normal(40, 4, 512, dtype=bf16), out, None, None)
    return out


def shuffle_rows(m: Inputs) -> Any:
    out = empty(60, 512)
    rows = m.integers(40, 60, dtype=torch.int32)
    torch.ops._moe_C.shuffle_rows(m.normal(40, 512, dtype=bf16), rows, out)
    return out


def sequences(m: Inputs, head: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    starts = torch.tensor([0, 17, 100, 128], device="cuda", dtype=torch.int32)
    return [m.normal(128, heads, head, dtype=dtype) for heads in (8, 2, 2)], starts


def flash2(head: int, dtype: torch.dtype) -> Operation:
    def run(m: Inputs) -> Any:
        qkv, starts = sequences(m, head, dtype)
        return torch.ops._vllm_fa2_C.varlen_fwd(
            *qkv, None, starts, starts, None, None, None, None, 83, 83, 0.0, head**-0.5,
            False, True, -1, -1, 0.0, False, 0, None,
        )[:2]  # fmt: skip

    return run


def pages(m: Inputs) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    caches = [m.normal(16, 16, 2, 128, dtype=bf16) for _ in range(2)]
    table = torch.arange(16, device="cuda", dtype=torch.int32).flip(0).view(4, 4).contiguous()
    used = torch.tensor([64, 33, 1, 50], device="cuda", dtype=torch.int32)
    starts = torch.arange(5, device="cuda", dtype=torch.int32)
    return [m.normal(4, 8, 128, dtype=bf16), *caches], table, used, starts


def flash2_paged(m: Inputs) -> Any:
    qkv, table, used, starts = pages(m)
    return torch.ops._vllm_fa2_C.varlen_fwd(
        *qkv, None, starts, torch.zeros_like(starts), used, None, table, None, 1, 64, 0.0, 0.1,
        False, True, -1, -1, 0.0, False, 0, None,
    )[:2]  # fmt: skip


def flash3(
    qkv: list[torch.Tensor],
    starts: Any,
    starts_k: Any,
    used: Any,
    table: Any,
    longest: tuple[int, int],
) -> Any:
    return torch.ops._vllm_fa3_C.fwd(
        *qkv, None, None, None, None, starts, starts_k, None, None, used, *longest, table,
        None, None, None, None, None, None, None, None, 0.1, True, -1, -1, 0.0, True, None, 1,
        None, 0, None, 1, 0, None,
    )[:2]  # fmt: skip


def flash3_varlen(head: int) -> Operation:
    def run(m: Inputs) -> Any:
        qkv, starts = sequences(m, head, bf16)
        return flash3(qkv, starts, starts, None, None, (83, 83))

    return run


def flash3_paged(m: Inputs) -> Any:
    qkv, table, used, starts = pages(m)
    return flash3(qkv, starts, None, used, table, (1, 64))


OPERATIONS: dict[str, dict[str, Operation]] = {
    "_C": {
        "silu_and_mul": gated("silu_and_mul", bf16),
        "mul_and_silu": gated("mul_and_silu", f16),
        "gelu_and_mul": gated("gelu_and_mul", bf16),
        "gelu_tanh_and_mul": gated("gelu_tanh_and_mul", f32),
        "fatrelu_and_mul": gated("fatrelu_and_mul", bf16, 0.1),
        "gelu_new": activation("gelu_new"),
        "gelu_fast": activation("gelu_fast"),
        "gelu_quick": activation("gelu_quick"),
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "rms_norm_static_fp8_quant": rms_norm_fp8,
        "rms_norm_dynamic_per_token_quant": rms_norm_dynamic,
        "rotary_embedding neox": rotary_embedding(True),
        "rotary_embedding gptj": rotary_embedding(False),
        "reshape_and_cache_flash": reshape_and_cache_flash,
        "reshape_and_cache fp8": reshape_and_cache_fp8,
        "concat_and_cache_mla": concat_and_cache_mla,
        "static_scaled_fp8_quant": static_fp8,
        "dynamic_scaled_fp8_quant": dynamic_fp8,
        "dynamic_per_token_scaled_fp8_quant": per_token_fp8,
        "per_token_group_fp8_quant": per_group_fp8,
        "dynamic_scaled_int8_quant": dynamic_int8,
        "cutlass_scaled_mm fp8": cutlass_fp8,
        "cutlass_scaled_mm int8": cutlass_int8,
        "apply_repetition_penalties_": repetition_penalties,
        "merge_attn_states": merge_attn_states,
        "awq_dequantize": awq_dequantize,
        "gptq_marlin_repack": marlin_repack,
        "hadacore_transform": hadamard,
    },
    "_moe_C": {
        "topk_softmax": topk_softmax,
        "grouped_topk": grouped_topk,
        "moe_align_block_size": moe_align,
        "moe_sum": moe_sum,
        "shuffle_rows": shuffle_rows,
    },
    "_vllm_fa2_C": {
        "fa2 varlen_fwd 128 bf16": flash2(128, bf16),
        "fa2 varlen_fwd 64 fp16": flash2(64, f16),
        "fa2 varlen_fwd paged": flash2_paged,
    },
    "_vllm_fa3_C": {
        "fa3 fwd 128": flash3_varlen(128),
        "fa3 fwd 64": flash3_varlen(64),
        "fa3 fwd paged": flash3_paged,
    },
}
