"""GGUF files: a reader and a writer with one tensor in memory at a time.

The reader of the `gguf` package makes a memory map of every string, so a vocabulary of 50,000
tokens takes it 2 seconds of CPU time; this one unpacks the header from bytes in 0.1.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from cog_triton.build_scripts.openvino._script import progress
from cog_triton.errors import EngineIncompatible, ModelUnavailable

_T = gguf.GGUFValueType
_SCALARS = {
    **{_T.UINT8: "B", _T.INT8: "b", _T.UINT16: "H", _T.INT16: "h", _T.UINT32: "I", _T.INT32: "i"},
    **{_T.UINT64: "Q", _T.INT64: "q", _T.FLOAT32: "f", _T.FLOAT64: "d", _T.BOOL: "?"},
}
_PLAIN = {
    **{"F16": np.float16, "F32": np.float32, "F64": np.float64},
    **{"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64},
}
Array = npt.NDArray[Any]
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}


@dataclass(frozen=True)
class Field:
    """A metadata entry; `type` and, of an array, `item_type` are GGUF value types."""

    key: str
    value: Any
    type: Any
    item_type: Any = None


@dataclass(frozen=True)
class Stored:
    """A tensor in the file: `shape` rows first, `data` its bytes, or its values where plain."""

    type: Any
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


class GGUFReader:
    """Metadata and tensors of a file, both in its order.

    Raises:
        ValueError: the file is no GGUF, or names no such type.
        struct.error: it ends too early.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic, version, tensors, entries = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        self.fields: dict[str, Field] = {}
        for _ in range(entries):
            key = self._string()
            if key in self.fields:
                raise ValueError(f"metadata {key} twice")
            self.fields[key] = self._field(key)
        infos = [self._info() for _ in range(tensors)]
        alignment = self.fields.get("general.alignment")
        step = int(alignment.value) if alignment else gguf.GGUF_DEFAULT_ALIGNMENT
        if step <= 0 or step & (step - 1):
            raise ValueError(f"alignment {step}")
        start = self._at + -self._at % step
        self.tensors = {name: self._tensor(start, *rest) for name, *rest in infos}
        if len(self.tensors) != len(infos):
            raise ValueError("a tensor's name is there twice")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._bytes, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        begin, self._at = self._at, self._at + length
        if self._at > len(self._bytes):
            raise struct.error("a string ends behind the file")
        return self._bytes[begin : self._at].decode("utf-8")

    def _field(self, key: str) -> Field:
        kind = _T(self._unpack("I")[0])
        if kind == _T.STRING:
            return Field(key, self._string(), kind)
        if kind != _T.ARRAY:
            return Field(key, self._unpack(_SCALARS[kind])[0], kind)
        item, count = self._unpack("IQ")
        item = _T(item)
        if item == _T.STRING:
            return Field(key, [self._string() for _ in range(count)], kind, item)
        if item == _T.ARRAY or count > len(self._bytes):
            raise ValueError(f"an array of {count} {item.name}")
        return Field(key, list(self._unpack(f"{count}{_SCALARS[item]}")), kind, item)

    def _info(self) -> tuple[str, Any, tuple[int, ...], int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        if dimensions > 8:
            raise ValueError(f"tensor {name} of {dimensions} dimensions")
        *shape, kind, offset = self._unpack(f"{dimensions}QIQ")
        return name, gguf.GGMLQuantizationType(kind), tuple(reversed(shape)), offset

    def _tensor(self, start: int, kind: Any, shape: tuple[int, ...], offset: int) -> Stored:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        plain = _PLAIN.get(kind.name)
        stored = shape if plain else gguf.quants.quant_shape_to_byte_shape(shape, kind)
        count = int(np.prod(shape, dtype=object)) // block * size
        if start + offset + count > len(self._bytes):
            raise struct.error("a tensor ends behind the file")
        raw = np.frombuffer(self._bytes, np.uint8, count, start + offset)
        return Stored(kind, shape, raw.view(plain or np.uint8).reshape(stored))


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
        return [field for key, field in self._entries.items() if key not in skipped]

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
    """`values` in GGUF type `kind`; where that has blocks, bytes of shape [rows, row bytes].

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
