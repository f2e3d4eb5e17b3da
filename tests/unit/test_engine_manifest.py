"""Engine manifest (cog-triton.json): written, read and verified against the files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from sample_engines import create

from cog_triton.artifact.engine_manifest import MANIFEST_NAME, Manifest, load, verify
from cog_triton.errors import EngineCorrupt


def engine(directory: Path) -> Manifest:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "sub").mkdir(exist_ok=True)
    (directory / "sub" / "weights.bin").write_bytes(b"weights")
    return create(
        directory,
        engine="openvino",
        model_id="pypi:x==1",
        config_sha256="0" * 64,
        versions={"cog_triton": "2", "openvino": "1"},
        max_input_len=7,
        max_seq_len=8,
        max_batch_size=2,
    )


def test_manifest_has_the_documented_shape(tmp_path: Path) -> None:
    written = engine(tmp_path)
    value = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert list(value) == [
        "schema",
        "engine",
        "model_id",
        "revision",
        "config_sha256",
        "sm",
        "gpu_name",
        "versions",
        "world_size",
        "max_input_len",
        "max_seq_len",
        "max_batch_size",
        "files",
    ]
    assert value["schema"] == 1
    digest = hashlib.sha256(b"weights").hexdigest()
    assert value["files"]["sub/weights.bin"] == {"size": 7, "sha256": digest}
    assert list(value["files"]) == ["config.json", "sub/weights.bin"]
    assert load(tmp_path) == written
    verify(tmp_path, written)


def test_a_directory_without_manifest_loads_none(tmp_path: Path) -> None:
    assert load(tmp_path) is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            '"schema": 1',
            '"schema": 4',
            "schema: 4: must be 1, 2 or 3; a later version",
        ),
        ('"files"', '"runtime": {"a": 1}, "files"', "runtime needs schema 2"),
        ('"schema": 1', '"schema": 2, "runtime": {"a": 1}', "runtime is for engines of tensorrt"),
        ('"max_seq_len": 8', '"max_seq_len": "8"', "max_seq_len: '8'"),
        ('"world_size": 1', '"world_size": 0', "world_size: 0"),
        ('"size": 7', '"size": -7', "files.sub/weights.bin.size: -7"),
        ('"engine": "openvino"', '"surprise": 1', "engine"),
        ("{", "", "the document"),
    ],
)
def test_a_broken_manifest_is_refused_by_key(old: str, new: str, says: str, tmp_path: Path) -> None:
    engine(tmp_path)
    path = tmp_path / MANIFEST_NAME
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(EngineCorrupt) as caught:
        load(tmp_path)
    assert says in str(caught.value)


def test_a_changed_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    manifest = engine(tmp_path)
    (tmp_path / "sub" / "weights.bin").write_bytes(b"weight")
    with pytest.raises(EngineCorrupt, match=r"sub/weights.bin has 6 bytes, the manifest says 7"):
        verify(tmp_path, manifest)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    manifest = engine(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(EngineCorrupt, match=r"config.json is in the manifest but missing"):
        verify(tmp_path, manifest)
