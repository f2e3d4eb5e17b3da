"""safetensors reader without torch, bfloat16 included, one tensor at a time.

Format: an 8-byte little-endian header length, a JSON header, then the raw data.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.errors import EngineIncompatible, ModelUnavailable
from cog_triton.examples.openvino._script import read_json

_TYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor: `dtype` is F32, F16 or BF16, `start` a byte offset in `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def floats(self) -> npt.NDArray[np.float32]:
        """The values as float32, exactly."""
        raw = np.memmap(self.path, _TYPES[self.dtype], "r", offset=self.start, shape=self.shape)
        if self.dtype == "BF16":
            return np.asarray((raw.astype(np.uint32) << 16).view(np.float32))
        return np.asarray(raw, dtype=np.float32)


def index(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory's ``*.safetensors``, by name.

    Raises:
        ModelUnavailable: a shard is missing, truncated or broken, or a name is there twice.
        EngineIncompatible: an element type other than F32, F16 or BF16.
    """
    shards = sorted(directory.glob("*.safetensors"))
    listing = directory / "model.safetensors.index.json"
    if listing.is_file():
        named = {str(name) for name in read_json(listing).get("weight_map", {}).values()}
        for name in sorted(named - {shard.name for shard in shards}):
            raise ModelUnavailable(f"{directory / name}: missing shard named in {listing.name}")
        shards = [shard for shard in shards if shard.name in named]
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in _read_header(shard).items():
            if name in found:
                raise ModelUnavailable(f"{shard}: tensor {name} is also in {found[name].path.name}")
            found[name] = tensor
    if not found:
        raise ModelUnavailable(f"{directory}: no *.safetensors with tensors in it")
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER
        if length > min(size, _MAX_HEADER):
            raise ModelUnavailable(f"{path}: not a safetensors file, or truncated")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ModelUnavailable(f"{path}: broken safetensors header: {error}") from error
    try:
        return {
            str(name): _located(path, str(name), entry, 8 + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelUnavailable(f"{path}: broken safetensors header: {error!r}") from error


def _located(path: Path, name: str, entry: dict[str, Any], base: int, size: int) -> StoredTensor:
    """A header entry, checked against the file's `size`; data starts at byte `base`."""
    dtype, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
    start, end = map(int, entry["data_offsets"])
    if dtype not in _TYPES:
        raise EngineIncompatible(f"tensor {name} is {dtype}; F32, F16 and BF16 can be converted")
    want = math.prod(shape) * np.dtype(_TYPES[dtype]).itemsize
    if start < 0 or end - start != want or base + end > size:
        raise ModelUnavailable(f"{path}: tensor {name} is truncated or misdescribed")
    return StoredTensor(path, dtype, shape, base + start)
