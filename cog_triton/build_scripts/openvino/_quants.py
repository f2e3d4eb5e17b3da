"""Quantization formats that OpenVINO's GGUF reader represents exactly.

The reader turns a Q4_1 block (scale d, minimum m) into ``(q - z) * d`` with ``z`` the rounded
``-m / d`` in four bits, so a block whose minimum is no such multiple comes out wrong. Our Q4_1
blocks are made with an integer z; other blocks are recognised, and refused by `build.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.build_scripts.openvino import _gguf_file

Floats = npt.NDArray[np.float32]
BLOCK = 32


def encode(values: Floats, kind: str, name: str) -> npt.NDArray[Any]:
    """`values` [rows, columns] in GGUF type `kind`: bytes of shape [rows, row bytes].

    Raises:
        EngineIncompatible: a value is not finite, or too large for float16.
    """
    if kind != "Q4_1":
        return _gguf_file.encode(values, kind, name)
    blocks = values.reshape(-1, BLOCK)
    low = np.minimum(blocks.min(axis=1), 0.0)
    high = np.maximum(blocks.max(axis=1), 0.0)
    scale = ((high - low) / 15.0).astype(np.float16)
    wide = scale.astype(np.float32)[:, None]
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)
    zero = np.clip(np.rint(-low[:, None] * inverse), 0, 15)
    steps = np.clip(np.rint(blocks * inverse) + zero, 0, 15).astype(np.uint8)
    minimum = (-zero * wide).astype(np.float16)
    packed = steps[:, : BLOCK // 2] | (steps[:, BLOCK // 2 :] << 4)
    bytes_ = np.hstack([scale[:, None].view(np.uint8), minimum.view(np.uint8), packed])
    return np.ascontiguousarray(bytes_.reshape(values.shape[0], -1))


def is_exact_q4_1(raw: npt.NDArray[np.uint8]) -> bool:
    """Whether every Q4_1 block in `raw` (bytes) is one the reader represents exactly."""
    heads = np.ascontiguousarray(raw.reshape(-1, 20)[:, :4]).view(np.float16).astype(np.float32)
    scale, minimum = heads[:, 0], heads[:, 1]
    zero = np.rint(np.divide(-minimum, scale, out=np.zeros_like(scale), where=scale != 0))
    close = np.abs(minimum + zero * scale) <= np.abs(minimum) * 2.0**-10
    return bool(((zero >= 0) & (zero <= 15) & close & (scale > 0) | (minimum == 0)).all())
