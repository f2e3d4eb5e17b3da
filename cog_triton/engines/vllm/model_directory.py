"""vLLM engine directory: its arguments, model, tokenizer, adapters and sequence length."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cog_triton.engines.vllm.argument_types import ArgumentTypes, convert, types_of
from cog_triton.errors import (
    EngineCorrupt,
    InvalidPredictorConfig,
    ModelUnavailable,
    UnexpectedEngineArg,
    nearest,
)
from cog_triton.sizing.memory_sum import text_part
from cog_triton.system.paths import expanded

# vllm/transformers_utils/model_arch_config_convertor.py and vllm/config/model.py of 0.33.
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_DEFAULT_LENGTH = 2048
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ["*config*.json", "tokenizer*", "*.jinja", "chat_template.json"]


def local_model(where: Path, name: str) -> Path | None:
    """The directory that `name` means beside the file `where`; None for a hub id.

    Raises E1304 if it is neither.
    """
    path = (where.parent / expanded(name)).resolve()
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name):
        raise ModelUnavailable(f"{where}: {name!r}: no such directory, no hub id")
    return None


def _from_hub(where: Path, argument: str, name: str, arguments: Mapping[str, Any]) -> Path:
    """Download the small files of `name` from the hub; the weights are left to vLLM.

    `where` and `argument` name the file and its key in errors. Raises E1304.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name,
            revision=arguments.get("revision" if argument == "model" else "tokenizer_revision"),
            cache_dir=arguments.get("download_dir"),
            token=arguments.get("hf_token"),
            allow_patterns=_SMALL_FILES,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelUnavailable(
            f"{where}: {argument}={name!r}: is no directory here, and the hub does not give it:"
            f" {reason}"
        ) from error
    return Path(found)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises E1306."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EngineCorrupt(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise EngineCorrupt(f"{path}: must be a JSON object")
    return content


def text_config(model: Path) -> Mapping[str, Any]:
    """config.json of a model, with the part for text at its top."""
    return text_part(read_object(model / "config.json"))


def derived_length(model: Path) -> int:
    """The model's sequence length without RoPE scaling, derived as vLLM does."""
    config = text_config(model)
    lengths = [config[key] for key in _LENGTH_KEYS if type(config.get(key)) is int]
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
        lengths += [
            source["original_max_position_embeddings"]
            for source in (config, rope)
            if type(source.get("original_max_position_embeddings")) is int
        ]
    tokenizer_config = model / "tokenizer_config.json"
    if lengths and tokenizer_config.is_file():
        stated = read_object(tokenizer_config).get("model_max_length")
        lengths += [int(stated)] if isinstance(stated, int | float) and stated >= 1 else []
    return min(lengths, default=_DEFAULT_LENGTH)


MODEL_FILE = "model.json"
LORA_FILE = "multi_lora.json"


def read_arguments(directory: Path, version: str | None = None) -> dict[str, Any]:
    """The engine arguments in ``model.json``, each of the type that vLLM wants.

    Raises E1306 for a file that is missing or no JSON object, and as `checked_arguments`.
    """
    path = directory / MODEL_FILE
    return checked_arguments(path, read_object(path), version)


def checked_arguments(
    path: Path, given: Mapping[str, Any], version: str | None = None
) -> dict[str, Any]:
    """Engine arguments, each of the type that vLLM wants; `path` names where they are `given`.

    `version` is vLLM's, by default the recorded one. Raises E1201 for a name that vLLM does not
    have, saying what to use instead, E1202 for a value of the wrong type.
    """
    types = types_of(version)
    return {name: _checked(types, path, name, value) for name, value in given.items()}


def _checked(types: ArgumentTypes, path: Path, name: str, value: Any) -> Any:
    known = types.engine_args
    if name in known:
        try:
            return convert(value, known[name])
        except ValueError as error:
            at = f"{path}: {name}={value!r}"
            raise InvalidPredictorConfig(f"{at}: {error} (vLLM {types.version})") from error
    if types.exact:
        raise UnexpectedEngineArg(
            f"{path}: {name}: {types.title} has no such engine argument{nearest(name, list(known))}"
        )
    return value  # vLLM checks its arguments when it is loaded


def read_loras(directory: Path) -> dict[str, str]:
    """``multi_lora.json``: where each LoRA adapter is, by name; raises E1306.

    The serve config names adapters, too, so there may be no such file.
    """
    path = directory / LORA_FILE
    loras = read_object(path) if path.exists() else {}
    for name, place in loras.items():
        if not isinstance(place, str) or not place:
            raise EngineCorrupt(f"{path}: {name}={place!r}: must be the path of an adapter")
        loras[name] = str(directory / place) if (directory / place).exists() else place
    return loras


def refuse_unknown(arguments: Mapping[str, Any], known: list[str], version: str) -> None:
    """Refuse arguments that the installed vLLM does not have; raises E1201."""
    for name in arguments:
        if name not in known:
            raise UnexpectedEngineArg(
                f"{MODEL_FILE}: {name}: vLLM {version} has no such engine argument"
                f"{nearest(name, known)}"
            )


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
        return self.arguments.get("nnodes") or 1

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
    if arguments.get("node_rank"):
        raise InvalidPredictorConfig(
            f"{where}: node_rank={arguments['node_rank']!r}: leave it out: this server is node 0;"
            " `vllm serve --headless` starts the others (multi-gpu.md)"
        )
    named = arguments.get("model") or ("." if (directory / "config.json").is_file() else None)
    if named is None:
        raise InvalidPredictorConfig(
            f"{where}: model: missing, and there is no config.json beside; name a directory of"
            " Hugging Face weights or a hub id"
        )
    model = local_model(where, named)
    if model:
        _check_weights(model, arguments)
    files = model or _from_hub(where, "model", named, arguments)
    arguments["model"] = str(model or named)
    tokenizer_dir = files
    if tokenizer := arguments.get("tokenizer"):
        local = local_model(where, tokenizer)
        tokenizer_dir = local or _from_hub(where, "tokenizer", tokenizer, arguments)
        arguments["tokenizer"] = str(local or tokenizer)
    length = arguments.get("max_model_len")
    if length is None:
        length = derived_length(files)
        arguments["max_model_len"] = length  # vLLM must use the same
    if length < 1:
        raise InvalidPredictorConfig(
            f"{where}: max_model_len={length}: must be at least 1; vLLM would fit it to the GPU's"
            " memory, but requests are checked before the engine has loaded"
        )
    loras = read_loras(directory) if arguments.get("enable_lora") else {}
    config = text_config(files)
    return VLLMModel(
        arguments,
        loras,
        tokenizer_dir,
        length,
        _architectures(files, arguments),
        _whole_number(config, "hidden_size", "n_embd"),
        _whole_number(config, "num_hidden_layers", "n_layer"),
    )


def enter_model(directory: Path, version: str | None = None) -> VLLMModel:
    """Read the model of `directory` as `read_model`, and make that the working directory.

    A model, a tokenizer or any path of vLLM's arguments that lies below it is relative then: the
    text of a model's path is a part of vLLM's hash of what it compiles, and an engine has another
    absolute path on every machine. It begins with a dot, as no name on the hub does.
    """
    directory = directory.resolve()
    model = read_model(directory, version)
    os.chdir(directory)
    paths = {name: Path(model.arguments.get(name) or "/") for name in ("model", "tokenizer")}
    inside = {
        name: "." if path == directory else f"./{path.relative_to(directory)}"
        for name, path in paths.items()
        if path.is_relative_to(directory)
    }
    return replace(model, arguments={**model.arguments, **inside})


def weight_files(model: Path) -> list[Path]:
    """The files with weights of one kind, in order; none where they are not in this directory."""
    return next(filter(None, (sorted(model.glob(kind)) for kind in _WEIGHTS)), [])


def weight_bytes(model: Path) -> int:
    """Size of the files with weights; 0 where they are not in this directory."""
    return sum(path.stat().st_size for path in weight_files(model))


def read_ahead_files(arguments: Mapping[str, Any]) -> list[Path]:
    """What vLLM will read through the page cache; other loaders than its own go past it."""
    ours = arguments.get("load_format") in (None, "auto", "hf", "safetensors", "mistral", "pt")
    return weight_files(Path(arguments["model"])) if ours else []


def _check_weights(model: Path, arguments: Mapping[str, Any]) -> None:
    if not (model / "config.json").is_file():
        raise EngineCorrupt(f"{model / 'config.json'}: missing")
    if arguments.get("load_format") == "dummy":
        return
    if not any(found for pattern in _WEIGHTS for found in model.glob(pattern)):
        raise EngineCorrupt(f"{model}: no weights ({', '.join(_WEIGHTS)})")


def _architectures(model: Path, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the model's classes, which model.json may replace."""
    overrides = arguments.get("hf_overrides")
    config = read_object(model / "config.json")
    found = {**config, **(overrides if isinstance(overrides, dict) else {})}.get("architectures")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _whole_number(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if type(config.get(name)) is int), None)
