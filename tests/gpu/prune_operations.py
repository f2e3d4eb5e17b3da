"""Operations of PyTorch and of vLLM's libraries: prints the SHA-256 of each result, or its error.

    python prune_operations.py [DIRECTORY OF vllm]

Inputs come from a seeded generator on the CPU, so that they do not depend on what is tested; each
operation gives equal bits every time. vLLM's Python package is not imported; signatures are those
that its libraries register in 0.33. Prints {"libraries": [paths], "results": {group: {name: ...}}}.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
fp8 = torch.float8_e4m3fn
LIBRARIES = {
    "torch": "libtorch_cuda.so",
    "_C": "_C_stable_libtorch.abi3.so",
    "_moe_C": "_moe_C_stable_libtorch.abi3.so",
    "_vllm_fa2_C": "vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "_vllm_fa3_C": "vllm_flash_attn/_vllm_fa3_C.abi3.so",
}


class Inputs:
    """Random inputs on the GPU, the same in every process that draws in the same order."""

    def __init__(self, seed: int = 2026) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=f64).to("cuda", dtype)

    def integers(
        self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to("cuda", dtype)

    def positive(self, size: int) -> torch.Tensor:
        """A symmetric positive definite matrix."""
        half = self.normal(size, size)
        return half @ half.T + size * torch.eye(size, device="cuda")


Operation = Callable[[Inputs], Any]


def empty(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def seeded(draw: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(7)
    return draw()


def lstm(m: Inputs) -> Any:
    torch.manual_seed(1)
    layer = torch.nn.LSTM(64, 128, 2, batch_first=True).cuda()
    return layer(m.normal(8, 20, 64))[0]


def backward(m: Inputs) -> Any:
    leaf = m.normal(64, 256).requires_grad_()
    functional.gelu(functional.layer_norm(leaf, (256,))).pow(2).mean().backward()
    return leaf.grad


TORCH: dict[str, Operation] = {
    "matmul": lambda m: m.normal(256, 512, dtype=bf16) @ m.normal(512, 128, dtype=bf16),
    "conv2d": lambda m: functional.conv2d(m.normal(4, 16, 33, 33), m.normal(32, 16, 3, 3)),
    "attention": lambda m: functional.scaled_dot_product_attention(
        *(m.normal(2, 8, 128, 64, dtype=bf16) for _ in range(3)), is_causal=True
    ),
    "attention with bias": lambda m: functional.scaled_dot_product_attention(
        *(m.normal(2, 4, 64, 64, dtype=f16) for _ in range(3)),
        attn_mask=m.normal(2, 4, 64, 64, dtype=f16),
    ),
    "sort": lambda m: m.normal(100_003).sort(),
    "topk": lambda m: m.normal(20, 5000).topk(40),
    "kthvalue": lambda m: m.normal(50, 301).kthvalue(17),
    "svd": lambda m: torch.linalg.svd(m.normal(48, 32))[1],
    "cholesky": lambda m: torch.linalg.cholesky(torch.stack([m.positive(16) for _ in range(9)])),
    "lu": lambda m: torch.linalg.lu_factor(torch.stack([m.positive(12) for _ in range(7)])),
    "softmax": lambda m: m.normal(40, 3000).softmax(-1),
    "log softmax": lambda m: m.normal(33, 1000, dtype=bf16).log_softmax(-1),
    "layer norm": lambda m: functional.layer_norm(m.normal(50, 768), (768,), m.normal(768)),
    "group norm": lambda m: functional.group_norm(m.normal(4, 32, 20, 20), 8),
    "rms norm": lambda m: functional.rms_norm(m.normal(50, 512, dtype=bf16), (512,)),
    "embedding": lambda m: functional.embedding(m.integers(900, 40, 20), m.normal(900, 64)),
    "cumsum": lambda m: m.normal(50, 999).cumsum(1),
    "scatter add": lambda m: empty(60, dtype=torch.int64).scatter_add_(
        0, m.integers(60, 5000), m.integers(99, 5000)
    ),
    "gather": lambda m: m.normal(50, 60).gather(1, m.integers(60, 50, 30)),
    "index select": lambda m: m.normal(300, 77).index_select(0, m.integers(300, 40)),
    "masked select": lambda m: (x := m.normal(9999)).masked_select(x > 0.3),
    "unique": lambda m: m.integers(500, 20_000).unique(return_inverse=True, return_counts=True),
    "nonzero": lambda m: (m.normal(300, 200) > 1).nonzero(),
    "bincount": lambda m: m.integers(300, 20_000).bincount(),
    "max pool": lambda m: functional.max_pool2d(m.normal(4, 8, 40, 40), 3, 2, return_indices=True),
    "bicubic": lambda m: functional.interpolate(m.normal(2, 3, 30, 40), (50, 70), mode="bicubic"),
    "lstm": lstm,
    "backward": backward,
    "normal": lambda _: seeded(lambda: torch.randn(5000, device="cuda")),
    "gelu": lambda m: functional.gelu(m.normal(9999, dtype=bf16)),
    "special": lambda m: [f(m.normal(999).abs()) for f in (torch.lgamma, torch.erfinv, torch.i0)],
    "complex": lambda m: torch.view_as_real(torch.polar(m.normal(500).abs(), m.normal(500)).exp()),
    "reduce": lambda m: [m.normal(333, 77).sum(0), m.normal(99, 99).norm(), m.normal(9, 9).var()],
    "argmax": lambda m: m.normal(80, 5000).argmax(1),
    "foreach": lambda m: torch._foreach_mul([m.normal(50), m.normal(60)], 3.0),
    "fp8": lambda m: m.normal(999).to(fp8).float(),
}


def filled(name: str, wide: int = 512) -> Operation:
    """An operation of _C that writes 37 rows of 512, of rows so wide."""

    def run(m: Inputs) -> Any:
        out = empty(37, 512)
        getattr(torch.ops._C, name)(out, m.normal(37, wide, dtype=bf16))
        return out

    return run


def rms_norm(m: Inputs) -> Any:
    out = empty(33, 1024)
    torch.ops._C.rms_norm(out, m.normal(33, 1024, dtype=bf16), m.normal(1024, dtype=bf16), 1e-6)
    return out


def rotary_embedding(m: Inputs) -> Any:
    query, key = m.normal(21, 8 * 128, dtype=bf16), m.normal(21, 2 * 128, dtype=bf16)
    table = m.normal(512, 128, dtype=bf16)
    torch.ops._C.rotary_embedding(m.integers(512, 21), query, key, 128, table, True)
    return query, key


def reshape_and_cache_flash(m: Inputs) -> Any:
    keys, values = empty(8, 16, 2, 128), empty(8, 16, 2, 128)
    slots = torch.arange(3, 24, device="cuda")
    new = [m.normal(21, 2, 128, dtype=bf16) for _ in range(2)]
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        *new, keys, values, slots, "auto", ones(1), ones(1)
    )
    return keys, values


def per_token_fp8(m: Inputs) -> Any:
    out, scale = empty(33, 512, dtype=fp8), empty(33, 1, dtype=f32)
    x = m.normal(33, 512, dtype=bf16)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(out, x, scale, None)
    return out, scale


def cutlass_fp8(m: Inputs) -> Any:
    out, a, b = empty(64, 256), m.normal(64, 512).to(fp8), m.normal(256, 512).to(fp8).T
    torch.ops._C.cutlass_scaled_mm(out, a, b, ones(1), ones(1), None)
    return out


def repetition_penalties(m: Inputs) -> Any:
    logits, masks = m.normal(5, 4000), [m.normal(5, 4000) > 1 for _ in range(2)]
    torch.ops._C.apply_repetition_penalties_(logits, *masks, m.normal(5).abs() + 1)
    return logits


def grouped_topk(m: Inputs) -> Any:
    return torch.ops._moe_C.grouped_topk(m.normal(40, 256), 8, 4, 8, True, 2.5, m.normal(256), 1)


def moe_sum(m: Inputs) -> Any:
    out = empty(40, 512)
    torch.ops._moe_C.moe_sum(m.normal(40, 4, 512, dtype=bf16), out, None, None)
    return out


def sequences(m: Inputs, head: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    starts = torch.tensor([0, 17, 100, 128], device="cuda", dtype=torch.int32)
    return [m.normal(128, heads, head, dtype=bf16) for heads in (8, 2, 2)], starts


def pages(m: Inputs) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    caches = [m.normal(16, 16, 2, 128, dtype=bf16) for _ in range(2)]
    table = torch.arange(16, device="cuda", dtype=torch.int32).flip(0).view(4, 4).contiguous()
    used = torch.tensor([64, 33, 1, 50], device="cuda", dtype=torch.int32)
    starts = torch.arange(5, device="cuda", dtype=torch.int32)
    return [m.normal(4, 8, 128, dtype=bf16), *caches], table, used, starts


def flash2(head: int) -> Operation:
    def run(m: Inputs) -> Any:
        qkv, starts = sequences(m, head)
        return torch.ops._vllm_fa2_C.varlen_fwd(
            *qkv, None, starts, starts, None, None, None, None, 83, 83, 0.0, head**-0.5,
            False, True, -1, -1, 0.0, False, 0, None,
        )[:2]  # fmt: skip

    return run


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


def flash3_varlen(m: Inputs) -> Any:
    qkv, starts = sequences(m, 128)
    return flash3(qkv, starts, starts, None, None, (83, 83))


def flash3_paged(m: Inputs) -> Any:
    qkv, table, used, starts = pages(m)
    return flash3(qkv, starts, None, used, table, (1, 64))


OPERATIONS: dict[str, dict[str, Operation]] = {
    "torch": TORCH,
    "_C": {
        "silu_and_mul": filled("silu_and_mul", 1024),
        "gelu_fast": filled("gelu_fast"),
        "rms_norm": rms_norm,
        "rotary_embedding": rotary_embedding,
        "reshape_and_cache_flash": reshape_and_cache_flash,
        "dynamic_per_token_scaled_fp8_quant": per_token_fp8,
        "cutlass_scaled_mm": cutlass_fp8,
        "apply_repetition_penalties_": repetition_penalties,
    },
    "_moe_C": {
        "grouped_topk": grouped_topk,
        "moe_sum": moe_sum,
    },
    "_vllm_fa2_C": {"128": flash2(128), "64": flash2(64), "paged": flash2_paged},
    "_vllm_fa3_C": {"128": flash3_varlen, "paged": flash3_paged},
}


def attempt(operation: Operation) -> str:
    """The digest of what an operation returns, bit for bit; "error: ..." if it fails."""
    try:
        digest = hashlib.sha256()
        for tensor in tensors(operation(Inputs())):
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
        torch.cuda.synchronize()
        return digest.hexdigest()
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is this operation's result
        return f"error: {type(error).__name__}: {str(error).splitlines()[0][:160]}"


def tensors(result: Any) -> Iterable[torch.Tensor]:
    """All tensors in what an operation returned."""
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result:
            yield from tensors(part)


def main(vllm: str | None = None) -> None:
    """Run the operations of all libraries that are there."""
    warnings.simplefilter("ignore")  # what these warn of is not what is tested
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    groups = ["torch"]
    for name, file in list(LIBRARIES.items())[1:] if vllm else ():
        if (path := Path(vllm or "", file)).exists():
            torch.ops.load_library(path)
            groups.append(name)
    results = {
        group: {name: attempt(operation) for name, operation in OPERATIONS[group].items()}
        for group in groups
    }
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = sorted({line.split()[-1] for line in lines if ".so" in line})
    print(json.dumps({"libraries": loaded, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
