"""Operations of PyTorch that launch kernels of libtorch_cuda.so and libtorch_cuda_linalg.so.

All inputs come from a seeded generator on the CPU, so that they do not depend on what is tested.
An operation takes `made`, which makes them, and returns tensors; each gives equal bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Operation = Callable[["Inputs"], Any]


class Inputs:
    """Random inputs on the GPU, the same in every process that draws in the same order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=f64).to("cuda", dtype)

    def integers(
        self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to("cuda", dtype)

    def positive(self, size: int, dtype: torch.dtype = f32) -> torch.Tensor:
        """A symmetric positive definite matrix."""
        half = self.normal(size, size, dtype=dtype)
        return half @ half.T + size * torch.eye(size, device="cuda", dtype=dtype)


def lstm(made: Inputs) -> Any:
    torch.manual_seed(1)
    layer = torch.nn.LSTM(64, 128, 2, batch_first=True).cuda()
    return layer(made.normal(8, 20, 64))[0]


def lstm_cell(made: Inputs) -> Any:
    torch.manual_seed(1)
    return torch.nn.LSTMCell(64, 128).cuda()(made.normal(8, 64))


def backward(made: Inputs) -> Any:
    leaf = made.normal(64, 256).requires_grad_()
    functional.gelu(functional.layer_norm(leaf, (256,))).pow(2).mean().backward()
    return leaf.grad


def seeded(draw: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(7)
    return draw()


OPERATIONS: dict[str, Operation] = {
    "matmul fp32": lambda m: m.normal(257, 511) @ m.normal(511, 129),
    "matmul bf16": lambda m: m.normal(256, 512, dtype=bf16) @ m.normal(512, 128, dtype=bf16),
    "matmul fp16": lambda m: m.normal(256, 512, dtype=f16) @ m.normal(512, 128, dtype=f16),
    "matmul fp64": lambda m: m.normal(128, 256, dtype=f64) @ m.normal(256, 64, dtype=f64),
    "bmm": lambda m: torch.bmm(m.normal(8, 64, 96), m.normal(8, 96, 32)),
    "einsum": lambda m: torch.einsum(
        "bhqd,bhkd->bhqk", m.normal(2, 4, 33, 16), m.normal(2, 4, 9, 16)
    ),
    "linear": lambda m: functional.linear(m.normal(32, 100), m.normal(50, 100), m.normal(50)),
    "conv2d": lambda m: functional.conv2d(m.normal(4, 16, 33, 33), m.normal(32, 16, 3, 3)),
    "depthwise conv": lambda m: functional.conv2d(
        m.normal(4, 32, 33, 33, dtype=bf16), m.normal(32, 1, 3, 3, dtype=bf16), groups=32
    ),
    "fft": lambda m: torch.view_as_real(torch.fft.rfft2(m.normal(4, 64, 60))),
    "attention bf16": lambda m: functional.scaled_dot_product_attention(
        *(m.normal(2, 8, 128, 64, dtype=bf16) for _ in range(3)), is_causal=True
    ),
    "attention fp32": lambda m: functional.scaled_dot_product_attention(
        *(m.normal(2, 4, 77, 40) for _ in range(3))
    ),
    "attention with bias": lambda m: functional.scaled_dot_product_attention(
        *(m.normal(2, 4, 64, 64, dtype=f16) for _ in range(3)),
        attn_mask=m.normal(2, 4, 64, 64, dtype=f16),
    ),
    "sort": lambda m: m.normal(100_003).sort(),
    "sort rows": lambda m: m.integers(50, 300, 700).sort(dim=1, stable=True),
    "topk": lambda m: m.normal(20, 5000).topk(40),
    "kthvalue": lambda m: m.normal(50, 301).kthvalue(17),
    "svd": lambda m: torch.linalg.svd(m.normal(48, 32))[1],
    "cholesky": lambda m: torch.linalg.cholesky(m.positive(64)),
    "cholesky batch": lambda m: torch.linalg.cholesky(
        torch.stack([m.positive(16) for _ in range(9)])
    ),
    "solve": lambda m: torch.linalg.solve(m.positive(64, f64), m.normal(64, 5, dtype=f64)),
    "triangular solve": lambda m: torch.linalg.solve_triangular(
        m.positive(32).tril(), m.normal(32, 4), upper=False
    ),
    "qr": lambda m: torch.linalg.qr(m.normal(5, 24, 16))[1],
    "eigh": lambda m: torch.linalg.eigvalsh(m.positive(40)),
    "inverse": lambda m: torch.linalg.inv(m.positive(33)),
    "lu batch": lambda m: torch.linalg.lu_factor(torch.stack([m.positive(12) for _ in range(7)])),
    "least squares": lambda m: torch.linalg.lstsq(m.normal(40, 10), m.normal(40, 3)).solution,
    "softmax": lambda m: m.normal(40, 3000).softmax(-1),
    "log softmax bf16": lambda m: m.normal(33, 1000, dtype=bf16).log_softmax(-1),
    "layer norm": lambda m: functional.layer_norm(m.normal(50, 768), (768,), m.normal(768)),
    "group norm": lambda m: functional.group_norm(m.normal(4, 32, 20, 20), 8),
    "batch norm": lambda m: functional.batch_norm(m.normal(8, 16, 9, 9), None, None, training=True),
    "rms norm": lambda m: functional.rms_norm(m.normal(50, 512, dtype=bf16), (512,)),
    "embedding": lambda m: functional.embedding(m.integers(900, 40, 20), m.normal(900, 64)),
    "embedding bag": lambda m: functional.embedding_bag(m.integers(90, 40, 7), m.normal(90, 32)),
    "cumsum": lambda m: m.integers(9, 70_001).cumsum(0),
    "cumsum rows": lambda m: m.normal(50, 999).cumsum(1),
    "scatter": lambda m: torch.zeros(500, device="cuda").scatter_(
        0, torch.arange(400, device="cuda") + 7, m.normal(400)
    ),
    "scatter add": lambda m: torch.zeros(60, device="cuda", dtype=torch.int64).scatter_add_(
        0, m.integers(60, 5000), m.integers(99, 5000)
    ),
    "gather": lambda m: m.normal(50, 60).gather(1, m.integers(60, 50, 30)),
    "index select": lambda m: m.normal(300, 77).index_select(0, m.integers(300, 40)),
    "index put": lambda m: m.normal(90).index_put_(
        (torch.arange(30, device="cuda"),), m.normal(30)
    ),
    "masked select": lambda m: (x := m.normal(9999)).masked_select(x > 0.3),
    "where": lambda m: torch.where(m.normal(777) > 0, m.normal(777), m.normal(777)),
    "unique": lambda m: m.integers(500, 20_000).unique(return_inverse=True, return_counts=True),
    "nonzero": lambda m: (m.normal(300, 200) > 1).nonzero(),
    "bincount": lambda m: m.integers(300, 20_000).bincount(),
    "histogram": lambda m: m.normal(9000).histc(50, -3, 3),
    "searchsorted": lambda m: torch.searchsorted(m.normal(500).sort()[0], m.normal(2000)),
    "max pool": lambda m: functional.max_pool2d(m.normal(4, 8, 40, 40), 3, 2, return_indices=True),
    "average pool": lambda m: functional.adaptive_avg_pool2d(m.normal(4, 8, 41, 37), 7),
    "interpolate": lambda m: functional.interpolate(
        m.normal(2, 3, 30, 40), scale_factor=1.7, mode="bilinear"
    ),
    "bicubic": lambda m: functional.interpolate(m.normal(2, 3, 30, 40), (50, 70), mode="bicubic"),
    "grid sample": lambda m: functional.grid_sample(
        m.normal(2, 3, 20, 20), m.normal(2, 15, 15, 2), align_corners=False
    ),
    "lstm": lstm,
    "lstm cell": lstm_cell,
    "backward": backward,
    "cross entropy": lambda m: functional.cross_entropy(m.normal(64, 500), m.integers(500, 64)),
    "normal": lambda m: seeded(lambda: torch.randn(5000, device="cuda")),
    "permutation": lambda m: seeded(lambda: torch.randperm(5000, device="cuda")),
    "multinomial": lambda m: (
        (w := m.normal(20, 400).softmax(-1)) is not None and seeded(lambda: w.multinomial(30))
    ),
    "dropout": lambda m: (
        (x := m.normal(9000)) is not None and seeded(lambda: functional.dropout(x, 0.3))
    ),
    "gelu bf16": lambda m: functional.gelu(m.normal(9999, dtype=bf16)),
    "special": lambda m: [f(m.normal(999).abs()) for f in (torch.lgamma, torch.erfinv, torch.i0)],
    "complex": lambda m: torch.view_as_real(torch.polar(m.normal(500).abs(), m.normal(500)).exp()),
    "reduce": lambda m: [m.normal(333, 77).sum(0), m.normal(99, 99).norm(), m.normal(9, 9).var()],
    "argmax": lambda m: m.normal(80, 5000).argmax(1),
    "cdist": lambda m: torch.cdist(m.normal(60, 7), m.normal(50, 7), p=1),
    "foreach": lambda m: torch._foreach_mul([m.normal(50), m.normal(60)], 3.0),
    "fp8": lambda m: m.normal(999).to(torch.float8_e4m3fn).float(),
    "fp8 matmul": lambda m: torch._scaled_mm(
        m.normal(64, 128).to(torch.float8_e4m3fn),
        m.normal(96, 128).to(torch.float8_e4m3fn).T,
        scale_a=torch.full((64, 1), 0.5, device="cuda"),
        scale_b=torch.full((1, 96), 0.25, device="cuda"),
        out_dtype=bf16,
    ),
    "grouped matmul": lambda m: torch._grouped_mm(
        m.normal(64, 32, dtype=bf16),
        m.normal(4, 48, 32, dtype=bf16).transpose(1, 2),
        offs=torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32),
    ),
    "int8 matmul": lambda m: torch._int_mm(
        m.integers(99, 64, 128, dtype=torch.int8), m.integers(99, 128, 64, dtype=torch.int8)
    ),
}
