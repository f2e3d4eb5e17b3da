"""The GGUF reader finds what gguf's own finds, and refuses broken files with its named errors."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from cog_triton.build_scripts.openvino._gguf_file import GGUFReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with an entry of every kind, and tensors plain and quantized."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 1)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("text", "é\n")
    writer.add_array("words", ["", "ab", "✓"])
    writer.add_array("numbers", [3, -1])
    writer.add_array("flags", [True, False])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.arange(6, dtype=np.float16).reshape(3, 2))
    values = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_everything_is_as_the_package_reads_it(path: Path) -> None:
    ours, theirs = GGUFReader(path), gguf.GGUFReader(path)
    fields = {key: f for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {key: entry.value for key, entry in ours.fields.items()} == {
        key: field.contents() for key, field in fields.items()
    }
    assert [(entry.type, entry.item_type) for entry in ours.fields.values()] == [
        (field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for field in fields.values()
    ]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.type == tensor.tensor_type.name
        assert found.raw is not None
        assert list(found.shape) == tensor.shape.tolist()[::-1]
        assert found.raw.tobytes() == tensor.data.tobytes()


def test_a_file_that_ends_early_is_refused(path: Path) -> None:
    last = gguf.GGUFReader(path).tensors[-1]
    whole = path.read_bytes()[: last.data_offset + last.n_bytes]  # padding may be missing
    for length in range(0, len(whole), 5):
        path.write_bytes(whole[:length])
        with pytest.raises((ValueError, struct.error)):
            GGUFReader(path)


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (b"NOPE" + struct.pack("<IQQ", 3, 0, 0), "magic b'NOPE'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "99 is not a valid"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 2**60), "an array of"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 1000), "of 1000 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**63, 0, 0), "behind the file"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, start: bytes, told: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start + bytes(64))
    with pytest.raises((ValueError, struct.error), match=told):
        GGUFReader(path)
