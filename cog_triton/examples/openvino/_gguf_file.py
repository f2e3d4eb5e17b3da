"""GGUF file reader and writer, with one tensor in memory at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from cog_triton.errors import EngineIncompatible, ModelUnavailable
from cog_triton.examples.openvino._gguf_reader import GGUFReader
from cog_triton.examples.openvino._script import progress

Array = npt.NDArray[Any]
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}


@dataclass(frozen=True)
class Field:
    """One metadata entry; `type` and `item_type` are GGUF value types."""

    key: str
    value: Any
    type: Any
    item_type: Any = None


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: `data()` gives its bytes in quantization type `type`, rows first."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: Callable[[], Array]


class Source:
    """A GGUF file opened for reading (memory-mapped).

    Raises:
        ModelUnavailable: the file is no readable GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError, struct.error) as error:
            raise ModelUnavailable(f"{path}: not a readable GGUF file: {error}") from error
        self._entries = reader.fields
        self.fields: dict[str, Any] = {key: entry.value for key, entry in reader.fields.items()}
        self.tensors = reader.tensors

    def metadata(self) -> list[Field]:
        """Metadata entries to copy: without the container's own and those about the weights."""
        skipped = ("general.architecture", "general.file_type", "general.quantization_version")
        return [
            Field(key, entry.value, entry.type, entry.item_type)
            for key, entry in self._entries.items()
            if key not in skipped
        ]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, rows first."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def type_of(self, name: str) -> str:
        return str(self.tensors[name].type.name)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's values as float32, rows first."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.type)
        return np.asarray(values, dtype=np.float32).reshape(tensor.shape)

    def raw(self, name: str) -> Array:
        """A tensor's bytes as stored."""
        return self.tensors[name].data


def encode(values: npt.NDArray[np.float32], kind: str, name: str) -> Array:
    """`values` in GGUF type `kind`.

    Raises:
        EngineIncompatible: a value is not finite, or too large for float16.
    """
    if not np.isfinite(values).all():
        raise EngineIncompatible(f"tensor {name} has values that are not finite")
    if kind == "F16" and float(np.abs(values).max(initial=0.0)) > 65504.0:
        raise EngineIncompatible(f"tensor {name} has values beyond float16; use --dtype float32")
    return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))


def write(path: Path, architecture: str, fields: Iterable[Field], tensors: list[Tensor]) -> None:
    """Write a GGUF file; `general.file_type` is the type of most of its matrices' elements."""
    writer = gguf.GGUFWriter(path, architecture)
    for field in fields:
        writer.add_key_value(field.key, field.value, field.type, sub_type=field.item_type)
    writer.add_file_type(FILE_TYPES[dominant_type((t.type, t.shape) for t in tensors)])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.type]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = int(np.prod(tensor.shape)) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in progress(tensors, len(tensors), f"{path.name}: tensors written"):
        writer.write_tensor_data(tensor.data())
    writer.close()


def dominant_type(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """The type that holds most elements among (type, shape) of matrices."""
    sizes: dict[str, int] = {}
    for kind, shape in tensors:
        if len(shape) > 1:
            sizes[kind] = sizes.get(kind, 0) + int(np.prod(shape))
    return max(sizes, key=lambda kind: sizes[kind])
