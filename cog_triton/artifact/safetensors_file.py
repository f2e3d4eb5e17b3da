"""safetensors file: reads the header, and one tensor at a time as float32; nothing is executed.

Format: an 8-byte little-endian header length, a JSON header, then the raw data. The header is read
without numpy, whose import would take the most of an engine process's start.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cog_triton.errors import EngineCorrupt, EngineIncompatible

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Types by numpy's name, which ends in the bytes of a value."""
_MAX_HEADER = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of a tensor: `dtype` is F32, F16 or BF16, `start` a byte offset in `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def floats(self) -> npt.NDArray[np.float32]:
        """The values as float32, exactly."""
        import numpy as np

        raw = np.memmap(self.path, _TYPES[self.dtype], "r", offset=self.start, shape=self.shape)
        if self.dtype == "BF16":
            return np.asarray((raw.astype(np.uint32) << 16).view(np.float32))
        return np.asarray(raw, dtype=np.float32)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file by name; raises E1306 for a broken file, E1305 for another type."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, _MAX_HEADER):
                raise EngineCorrupt(f"{path}: not a safetensors file, or truncated")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            str(name): _entry(path, str(name), item, 8 + length, size)
            for name, item in header.items()
        }
    except OSError as error:
        raise EngineCorrupt(f"{path}: cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise EngineCorrupt(f"{path}: broken safetensors header: {error!r}") from error


def _entry(path: Path, name: str, item: dict[str, Any], base: int, size: int) -> TensorEntry:
    """A header entry, checked against the file's `size`; data starts at byte `base`."""
    dtype, shape = str(item["dtype"]), tuple(int(extent) for extent in item["shape"])
    start, end = map(int, item["data_offsets"])
    if dtype not in _TYPES:
        raise EngineIncompatible(f"{path}: {name}: is {dtype[:40]}; must be F32, F16 or BF16")
    want = math.prod(shape) * int(_TYPES[dtype][-1])
    if start < 0 or min(shape, default=1) < 1 or end - start != want or base + end > size:
        raise EngineCorrupt(f"{path}: {name}: truncated or misdescribed")
    return TensorEntry(path, dtype, shape, base + start)
