"""Tensors, and the safetensors files that hold them, with the standard library alone.

The format: 8 bytes of header length, little-endian, a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

_CODES = {"F64": "d", "F32": "f", "F16": "e", "I8": "b", "U8": "B"}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Tensor:
    """Row-major `data` of one or two dimensions; `dtype` as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def part(self, axis: int | None, index: int, parts: int) -> Tensor:
        """The part `index` of `parts` equal ones along `axis`; all of it if that is None."""
        if axis is None or parts == 1:
            return self
        length = self.shape[axis]
        if length % parts:
            raise ValueError(f"{length} is not divisible by {parts}")
        each = length // parts
        if axis == 0:
            size = len(self.data) // parts
            data = self.data[index * size : (index + 1) * size]
            return Tensor(self.dtype, (each, *self.shape[1:]), data)
        row, width = length * _SIZES[self.dtype], each * _SIZES[self.dtype]
        starts = range(index * width, len(self.data), row)
        data = b"".join(self.data[start : start + width] for start in starts)
        return Tensor(self.dtype, (self.shape[0], each), data)

    def transposed(self) -> Tensor:
        size = _SIZES[self.dtype]
        rows, columns = self.shape
        items = [self.data[at : at + size] for at in range(0, len(self.data), size)]
        data = b"".join(items[r * columns + c] for c in range(columns) for r in range(rows))
        return Tensor(self.dtype, (columns, rows), data)

    def padded(self, rows: int) -> Tensor:
        """Pad with rows of zeros to `rows`."""
        row = len(self.data) // self.shape[0]
        return Tensor(self.dtype, (rows, *self.shape[1:]), self.data.ljust(rows * row, b"\0"))

    def values(self) -> tuple[float, ...]:
        count = prod(self.shape)
        if self.dtype == "BF16":
            halves = struct.unpack(f"<{count}H", self.data)
            return struct.unpack(
                f"<{count}f", struct.pack(f"<{count}I", *(h << 16 for h in halves))
            )
        return struct.unpack(f"<{count}{_CODES[self.dtype]}", self.data)

    def cast(self, dtype: str) -> Tensor:
        return self if dtype == self.dtype else of_values(dtype, self.shape, self.values())


def of_values(dtype: str, shape: tuple[int, ...], values: Sequence[float]) -> Tensor:
    if dtype == "BF16":
        words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        halves = [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]
        return Tensor(dtype, shape, struct.pack(f"<{len(values)}H", *halves))
    return Tensor(dtype, shape, struct.pack(f"<{len(values)}{_CODES[dtype]}", *values))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts along the first axis."""
    rows = sum(part.shape[0] for part in parts)
    shape = (rows, *parts[0].shape[1:])
    return Tensor(parts[0].dtype, shape, b"".join(part.data for part in parts))


def load(path: Path) -> dict[str, Tensor]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def save(tensors: dict[str, Tensor], path: Path) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.data)
