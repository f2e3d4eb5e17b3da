"""GGUF files: a reader and a writer with one tensor in memory at a time.

The reader of the `gguf` package makes a memory map of every string, so a vocabulary of 50,000
tokens takes it 2 seconds of CPU time, at each start of a server of the file; this one unpacks the
header from bytes in 0.1.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
Array = npt.NDArray[Any]
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
# Of the container and of the weights' types: the writer adds its own.
_OWN = ("general.architecture", "general.file_type", "general.quantization_version")


@dataclass(frozen=True)
class Field:
    """A metadata entry; `type` and, of an array, `item_type` are GGUF value types."""

    key: str
    value: Any
    type: Any
    item_type: Any = None


@dataclass(frozen=True)
class Tensor:
    """A tensor of GGUF type `type`, `shape` rows first: `floats()` gives its values, float32.

    `raw` has its bytes as they are stored, None if they are not as a GGUF file has them.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    floats: Callable[[], npt.NDArray[np.float32]]
    raw: Array | None = None


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
        self.tensors = {info[0]: self._tensor(start, *info) for info in infos}
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

    def _tensor(
        self, start: int, name: str, kind: Any, shape: tuple[int, ...], offset: int
    ) -> Tensor:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(shape) // block * size
        if start + offset + count > len(self._bytes):
            raise struct.error("a tensor ends behind the file")
        raw = np.frombuffer(self._bytes, np.uint8, count, start + offset)
        raw = raw.reshape(gguf.quants.quant_shape_to_byte_shape(shape, kind))

        def floats() -> npt.NDArray[np.float32]:
            values = gguf.quants.dequantize(raw, kind)
            return np.asarray(values, dtype=np.float32).reshape(shape)

        return Tensor(name, shape, kind.name, floats, raw)


def read(path: Path) -> tuple[list[Field], list[Tensor]]:
    """Metadata and tensors of a file, which is memory-mapped.

    Raises:
        ModelUnavailable: the file is no readable GGUF.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, struct.error) as error:
        raise ModelUnavailable(f"{path}: not a readable GGUF file: {error}") from error
    return [*reader.fields.values()], [*reader.tensors.values()]


def write(
    path: Path, architecture: str, fields: Iterable[Field], tensors: Sequence[tuple[Tensor, str]]
) -> None:
    """Write a GGUF file of tensors, each with the type that it is to have.

    Raises:
        EngineIncompatible: a value is not finite, or too large for float16.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for field in fields:
        if field.key not in _OWN:
            writer.add_key_value(field.key, field.value, field.type, sub_type=field.item_type)
    writer.add_file_type(FILE_TYPES[dominant_type(tensors)])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor, to in tensors:
        kind = gguf.GGMLQuantizationType[to]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(tensor.shape) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, to in progress(tensors, len(tensors), "build: tensors quantized"):
        same = tensor.raw is not None and tensor.type == to
        writer.write_tensor_data(tensor.raw if same else _encoded(tensor, to))
    writer.close()


def _encoded(tensor: Tensor, to: str) -> Array:
    values = np.ascontiguousarray(tensor.floats())
    if not np.isfinite(values).all():
        raise EngineIncompatible(f"tensor {tensor.name} has values that are not finite")
    if to == "F16" and float(np.abs(values).max(initial=0.0)) > 65504.0:
        raise EngineIncompatible(
            f"tensor {tensor.name} has values beyond float16; take --weights q8_0"
        )
    return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[to]))


def dominant_type(tensors: Iterable[tuple[Tensor, str]]) -> str:
    """The type that holds most elements of matrices."""
    sizes: Counter[str] = Counter()
    for tensor, kind in tensors:
        if len(tensor.shape) > 1:
            sizes[kind] += math.prod(tensor.shape)
    return sizes.most_common(1)[0][0]
