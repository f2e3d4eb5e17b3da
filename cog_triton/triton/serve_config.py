"""Serve config (COG_TRITON_CONFIG): arguments for the models of the repository."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from cog_triton.errors import InvalidPredictorConfig, nearest

_log = logging.getLogger(__name__)

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
ADAPTERS = "lora_adapters"
"""Key of the LoRA adapters beside the models."""
# Models that one engine family adds to the repository.
FAMILY_MODELS = ("vllm_model",)
# Other keys in model configs of the original cog-triton, for its deployment tools: the environment
# variable that has this meaning here, None if there is none.
_DEPLOYMENT_KEYS: Mapping[str, Mapping[str, str | None]] = {
    "instantiate": {"build": None},
    "server": {
        "base_model": None,
        "staging_dest": None,
        "weights": "COG_WEIGHTS",
        "system_prompt": "SYSTEM_PROMPT",
        "prompt_template": "PROMPT_TEMPLATE",
    },
}
_DEFAULT = Path("config.yaml")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Arguments by model name, unvalidated, and LoRA adapters: sources by name.

    Sources that are paths are relative to the config's `directory`.
    """

    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    directory: Path = Path()

    def arguments_of(self, model: str) -> Mapping[str, Any]:
        """The arguments of one model, empty when none were given."""
        return self.arguments.get(model, {})

    def with_overrides(self, model: str, arguments: Mapping[str, Any]) -> ServeConfig:
        """A copy with more arguments for `model`, which override those that it has."""
        changed = {**self.arguments, model: {**self.arguments_of(model), **arguments}}
        return replace(self, arguments=changed)


def find_serve_config(path: Path | None) -> ServeConfig:
    """The serve config at `path`; without one, ./config.yaml, where the original looks for it.

    That name is common: without the key ``instantiate`` it is something else. Raises E1202.
    """
    if path is not None:
        return load_serve_config(path)
    try:
        raw = yaml.safe_load(_DEFAULT.read_text("utf-8"))
    except (OSError, yaml.YAMLError, ValueError):
        return ServeConfig()
    if not isinstance(raw, dict) or "instantiate" not in raw:
        return ServeConfig()
    _log.info("serve config: %s, as COG_TRITON_CONFIG is not set", _DEFAULT.resolve())
    return load_serve_config(_DEFAULT)


def load_serve_config(path: Path) -> ServeConfig:
    """Read ``{instantiate: {server: {MODEL: {args: ...}}}}`` or its inner part alone.

    Raises E1202 naming the file, the YAML path and the nearest valid key.
    """
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidPredictorConfig(
            f"COG_TRITON_CONFIG={str(path)!r}: {error.strerror}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidPredictorConfig(f"{path}: not valid YAML: {reason}") from error
    models = _mapping(raw, path, "")
    where = ""
    for key in ("instantiate", "server"):
        if key in models or where:
            _require_known_keys(models, [key, *_DEPLOYMENT_KEYS[key]], path, where)
            for other_key, variable in _DEPLOYMENT_KEYS[key].items():
                if variable and other_key in models:
                    at = f"{where}.{other_key}".lstrip(".")
                    _log.warning("%s: %s is not read: set %s", path, at, variable)
            where = f"{where}.{key}".lstrip(".")
            models = _mapping(models.get(key), path, where)
    _require_known_keys(models, [*MODELS, *FAMILY_MODELS, ADAPTERS], path, where)
    adapters = _adapters(models.pop(ADAPTERS, None), path, f"{where}.{ADAPTERS}".lstrip("."))
    arguments = {}
    for model, body in models.items():
        at = f"{where}.{model}".lstrip(".")
        content = _mapping(body, path, at)
        _require_known_keys(content, ["args"], path, at)
        arguments[model] = _mapping(content.get("args"), path, f"{at}.args")
        for key in arguments[model]:
            if not isinstance(key, str):
                raise InvalidPredictorConfig(f"{path}: {at}.args: {key!r} is not a name")
    return ServeConfig(arguments, adapters, path.absolute().parent)


def _adapters(value: Any, path: Path, where: str) -> dict[str, str]:
    adapters = _mapping(value, path, where)
    for name, source in adapters.items():
        if not (isinstance(name, str) and isinstance(source, str) and source):
            raise InvalidPredictorConfig(
                f"{path}: {where}: {name!r}: {source!r}: must be the name of an adapter and its"
                " path, URL or hub id"
            )
    return adapters


def _mapping(value: Any, path: Path, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidPredictorConfig(f"{path}: {where or 'the file'}: {value!r} is not a mapping")
    return value


def _require_known_keys(
    mapping: Mapping[Any, Any], known: list[str], path: Path, where: str
) -> None:
    for key in mapping:
        if key not in known:
            raise InvalidPredictorConfig(
                f"{path}: {where or 'top level'}: unknown key {key!r}{nearest(str(key), known)};"
                f" known: {', '.join(known)}"
            )
