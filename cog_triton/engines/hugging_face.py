"""Hugging Face model of an engine that reads its weights as they are: files, length, end ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cog_triton.errors import EngineCorrupt, ModelUnavailable
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


def from_hub(
    where: Path,
    argument: str,
    name: str,
    revision: str | None,
    *,
    cache_dir: str | None = None,
    token: str | None = None,
) -> Path:
    """Download the small files of `name` from the hub; the weights are left to the engine.

    `where` and `argument` name the file and its key in errors. Raises E1304.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
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


def text_config(model: Path) -> dict[str, Any]:
    """config.json of a model, with the part for text at its top."""
    config = read_object(model / "config.json")
    for section in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(section), dict):
            config = {**config, **config[section]}
    return config


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


def end_ids(model: Path) -> frozenset[int]:
    """The ids that end the model's output, by generation_config.json, else by config.json."""
    path = model / "generation_config.json"
    found = read_object(path).get("eos_token_id") if path.is_file() else None
    found = text_config(model).get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [found]
    return frozenset(token for token in ids if type(token) is int)
