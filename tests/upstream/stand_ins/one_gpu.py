"""The GPU that torch reports: one H100, which trtllm-build asks for before it compiles."""

from __future__ import annotations

import torch

NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 80 << 30


def pretend() -> None:
    """Replace what torch.cuda tells of devices; torch computes on the CPU as before."""
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda _device: None
    torch.cuda.get_device_name = lambda _device=None: NAME
    torch.cuda.mem_get_info = lambda _device=None: (MEMORY_BYTES, MEMORY_BYTES)
