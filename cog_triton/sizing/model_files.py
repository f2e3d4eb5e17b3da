"""Files of a model: config.json and the size of its weights, from a directory or the hub."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.download.model_request import ModelRequest, is_hub_id
from cog_triton.errors import ModelUnavailable
from cog_triton.sizing.memory_sum import AS_STORED, ModelShape, Precision, read_shape
from cog_triton.system.paths import expanded

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_ENGINE_WEIGHTS = (".engine", ".safetensors", ".bin", ".pt")
_MAX_CONFIG = 16 << 20
_POINTER = b"version https://git-lfs."


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model by what describes it: `weight_bytes` are those of its files, `commit` the hub's."""

    name: str
    shape: ModelShape
    weight_bytes: int
    commit: str | None = None


def describe(model: str, revision: str | None = None) -> ModelFiles:
    """Read what describes `model`: a directory, or a hub id, of which no weights are fetched.

    Raises:
        ModelUnavailable: it is not there, or has no readable config.json.
        BuildConfigInvalid: its config.json lacks a size.
    """
    if is_hub_id(model):
        from cog_triton.download import hub  # it takes half a second

        listing, config = hub.describe(ModelRequest(model, revision))
        size = _weight_bytes({name: file.size for name, file in listing.files.items()})
        return _files(model, config, size, listing.commit)
    directory = expanded(model)
    if not directory.is_dir():
        raise ModelUnavailable(f"{model!r}: no such directory, and no Hugging Face id (ORG/NAME)")
    path = directory / "config.json"
    if not path.is_file() or path.stat().st_size > _MAX_CONFIG:
        raise ModelUnavailable(f"{path}: missing: {model} is no directory of Hugging Face weights")
    files = [one for one in directory.glob("*.*") if one.is_file()]
    size = _weight_bytes({one.name: one.stat().st_size for one in files})
    if pointer := next((one for one in files if _is_pointer(one)), None):
        raise ModelUnavailable(f"{pointer}: is Git LFS's pointer to a file: run git lfs pull there")
    return _files(str(directory.resolve()), path.read_bytes(), size, None)


def _is_pointer(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER
    return False


def _weight_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes of the files of one kind, without Mistral's own copy beside that of Hugging Face."""
    for pattern in _WEIGHTS:
        found = {name: size for name, size in sizes.items() if Path(name).match(pattern)}
        others = [size for name, size in found.items() if not name.startswith("consolidated")]
        if total := sum(others or found.values()):
            return total
    return 0


def of_engine(
    name: str, config: bytes | None, sizes: Mapping[str, int], length: int
) -> tuple[ModelFiles, Precision]:
    """Weights and KV cache of an engine with files of `sizes`, and sequences of `length` tokens.

    Its config.json is TensorRT-LLM's, or a model's own.

    Raises:
        ModelUnavailable: it has no config.json, or no weights.
        BuildConfigInvalid: its config.json lacks a size.
    """
    if config is None:
        raise ModelUnavailable(f"{name}: has no config.json at its top")
    value = config_of(config, name)
    model = value.get("pretrained_config")
    quantization: object = None
    if isinstance(model, dict):
        quantization = model.get("quantization")
        value = {"head_dim": model.get("head_size"), **model}
    shape = dataclasses.replace(read_shape(value, f"{name}: config.json"), max_len=length)
    weights = sum(size for file, size in sizes.items() if file.endswith(_ENGINE_WEIGHTS))
    if not weights:
        raise ModelUnavailable(f"{name}: has no weights of its own")
    cache = quantization.get("kv_cache_quant_algo") if isinstance(quantization, dict) else None
    kv = 1 if cache in ("FP8", "INT8") else 2
    title = f"weights as they are built, {8 * kv}-bit KV cache"
    precision = dataclasses.replace(AS_STORED, kv=kv, title=title)
    return ModelFiles(name, shape, weights), precision


def config_of(text: bytes, name: str) -> Mapping[str, Any]:
    """What config.json of the model `name` holds, of which `text` is the content.

    Raises:
        ModelUnavailable: it is no JSON, or no object.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{name}: config.json: is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelUnavailable(f"{name}: config.json: must hold an object")
    return values


def _files(name: str, config: bytes, size: int, commit: str | None) -> ModelFiles:
    shape = read_shape(config_of(config, name), f"{name}: config.json")
    return ModelFiles(name, shape, size or shape.parameters * shape.dtype_bytes, commit)
