"""Tensors of a directory's safetensors files, bfloat16 included, without torch."""

from __future__ import annotations

from pathlib import Path

from cog_triton.artifact.safetensors_file import TensorEntry, read_header
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.examples.openvino._script import read_json


def index(directory: Path) -> dict[str, TensorEntry]:
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
    found: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, tensor in _read_header(shard).items():
            if name in found:
                raise ModelUnavailable(f"{shard}: tensor {name} is also in {found[name].path.name}")
            found[name] = tensor
    if not found:
        raise ModelUnavailable(f"{directory}: no *.safetensors with tensors in it")
    return found


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(path)
    except EngineCorrupt as error:
        raise ModelUnavailable(error.detail) from error
