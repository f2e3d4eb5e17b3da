"""Files of a model or an engine: config.json, and the size of its weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cog_triton.download.model_request import config_of
from cog_triton.errors import ModelUnavailable
from cog_triton.sizing.memory_sum import AS_STORED, ModelShape, Precision, read_shape
from cog_triton.sources.source import Source

_WEIGHTS = (".safetensors", ".bin", ".pt")
_ENGINE_WEIGHTS = (".engine", *_WEIGHTS)
# Mistral's own copy, and what trainers and other runtimes leave beside the weights.
_NOT_WEIGHTS = ("consolidated", "training_args", "optimizer", "scheduler", "openvino_")
_POINTER = b"version https://git-lfs."


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model by what describes it: `weight_bytes` are those of its files, `commit` the hub's."""

    name: str
    shape: ModelShape
    weight_bytes: int
    commit: str | None = None


def describe(source: Source) -> ModelFiles:
    """Read what describes a model, of which no weights are fetched.

    Raises:
        ModelUnavailable: it is not there, or has no readable config.json.
        BuildConfigInvalid: its config.json lacks a size.
    """
    config = source.read("config.json")
    if config is None:
        raise ModelUnavailable(f"{source.name}: has no config.json, which says what model it is")
    weights = _weights({name: file.size for name, file in source.files().items()})
    name = source.name
    if source.path is not None:
        for file in weights:
            _require_no_pointer(source.path / file)
        name = str(source.path.resolve())
    shape = read_shape(config_of(config, name), f"{name}: config.json")
    size = sum(weights.values()) or shape.parameters * shape.dtype_bytes
    return ModelFiles(name, shape, size, source.digest)


def _require_no_pointer(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ModelUnavailable(
                f"{path}: is Git LFS's pointer to a file: run git lfs pull there"
            )


def _weights(sizes: Mapping[str, int]) -> dict[str, int]:
    """The weights at the top, of the first kind that there is."""
    for suffix in _WEIGHTS:
        found = {n: s for n, s in sizes.items() if n.endswith(suffix) and "/" not in n}
        others = {n: s for n, s in found.items() if not n.startswith(_NOT_WEIGHTS)}
        if found:
            return others or found
    return {}


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
