"""vLLM engine directory: resolves its model, tokenizer, adapters and sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.engines import hugging_face
from cog_triton.engines.vllm.model_arguments import (
    MODEL_FILE,
    read_arguments,
    read_loras,
    read_object,
)
from cog_triton.engines.vllm.nodes import check_nodes, node_count
from cog_triton.errors import EngineCorrupt, InvalidPredictorConfig

# vLLM's default for GPUs below 70 GB; the running engine reports the real value.
DEFAULT_MAX_NUM_SEQS = 256
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class VLLMModel:
    """Resolved vLLM model; `arguments` are all that AsyncEngineArgs gets; lengths in tokens."""

    arguments: Mapping[str, Any]
    loras: Mapping[str, str]
    tokenizer_dir: Path
    max_model_len: int
    architectures: tuple[str, ...] = ()
    hidden_size: int | None = None
    layers: int | None = None

    @property
    def max_num_seqs(self) -> int:
        """Batch size limit in requests, of all engines; vLLM may choose a larger one."""
        engines = self.arguments.get("data_parallel_size") or 1
        return (self.arguments.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS) * engines

    @property
    def nodes(self) -> int:
        """Machines that the engine is spread over."""
        return node_count(self.arguments)

    @property
    def embeds(self) -> bool:
        """Whether model.json has vLLM make embeddings (``runner``, ``convert``) instead of text."""
        runner = self.arguments.get("runner") or "auto"
        convert = self.arguments.get("convert") or "auto"
        return runner == "pooling" or (runner == "auto" and convert in ("embed", "classify"))


def read_model(directory: Path, version: str | None = None) -> VLLMModel:
    """Read ``model.json`` and the configuration of the model that it names.

    ``model`` may be left out beside a ``config.json``; else it is a path, absolute or from
    `directory`, or a hub id, of which the small files are fetched. `version` is vLLM's, if it is
    known. Raises E1201, E1202, E1304, E1306.
    """
    arguments = read_arguments(directory, version)
    where = directory / MODEL_FILE
    check_nodes(where, arguments)
    named = arguments.get("model") or ("." if (directory / "config.json").is_file() else None)
    if named is None:
        raise InvalidPredictorConfig(
            f"{where}: model: missing, and there is no config.json beside; name a directory of"
            " Hugging Face weights or a hub id"
        )
    model = hugging_face.local_model(where, named)
    if model:
        _check_weights(model, arguments)
    files = model or _from_hub(where, "model", named, arguments)
    arguments["model"] = str(model or named)
    tokenizer_dir = files
    if tokenizer := arguments.get("tokenizer"):
        local = hugging_face.local_model(where, tokenizer)
        tokenizer_dir = local or _from_hub(where, "tokenizer", tokenizer, arguments)
        arguments["tokenizer"] = str(local or tokenizer)
    length = arguments.get("max_model_len")
    if length is None:
        length = hugging_face.derived_length(files)
        arguments["max_model_len"] = length  # vLLM must use the same
    if length < 1:
        raise InvalidPredictorConfig(
            f"{where}: max_model_len={length}: must be at least 1; vLLM would fit it to the GPU's"
            " memory, but requests are checked before the engine has loaded"
        )
    loras = read_loras(directory) if arguments.get("enable_lora") else {}
    config = hugging_face.text_config(files)
    return VLLMModel(
        arguments,
        loras,
        tokenizer_dir,
        length,
        _architectures(files, arguments),
        _whole_number(config, "hidden_size", "n_embd"),
        _whole_number(config, "num_hidden_layers", "n_layer"),
    )


def weight_bytes(model: Path) -> int:
    """Size of the files with weights of one kind; 0 where they are not in this directory."""
    sizes = (sum(path.stat().st_size for path in model.glob(kind)) for kind in _WEIGHTS)
    return next(filter(None, sizes), 0)


def _check_weights(model: Path, arguments: Mapping[str, Any]) -> None:
    if not (model / "config.json").is_file():
        raise EngineCorrupt(f"{model / 'config.json'}: missing")
    if arguments.get("load_format") == "dummy":
        return
    if not any(found for pattern in _WEIGHTS for found in model.glob(pattern)):
        raise EngineCorrupt(f"{model}: no weights ({', '.join(_WEIGHTS)})")


def _from_hub(where: Path, argument: str, name: str, arguments: Mapping[str, Any]) -> Path:
    """The small files of `name`, from the hub; the weights are left to vLLM."""
    revision = arguments.get("revision" if argument == "model" else "tokenizer_revision")
    return hugging_face.from_hub(
        where,
        argument,
        name,
        revision,
        cache_dir=arguments.get("download_dir"),
        token=arguments.get("hf_token"),
    )


def _architectures(model: Path, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the model's classes, which model.json may replace."""
    overrides = arguments.get("hf_overrides")
    config = read_object(model / "config.json")
    found = {**config, **(overrides if isinstance(overrides, dict) else {})}.get("architectures")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _whole_number(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if type(config.get(name)) is int), None)
