"""Build config of a sealed vLLM engine, which ``engine: vllm`` begins, beside those of scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from cog_triton.artifact.seal import VARIABLE
from cog_triton.builder.adapter_config import Adapters, AdapterSource
from cog_triton.builder.canary_run import PROMPT, TOKENS
from cog_triton.builder.config import (
    SECRET,
    SECRET_OPTION,
    STRICT,
    BuildConfig,
    Seconds,
    SourceConfig,
    Text,
    known_keys,
    load_yaml,
    parse_config,
    read_text,
)
from cog_triton.builder.config_errors import describe
from cog_triton.engines.vllm.model_directory import checked_arguments
from cog_triton.errors import BuildConfigInvalid, CogTritonError

ENGINE = "vllm"
# Arguments that the build itself gives, and those that one machine cannot be sealed with.
_OURS = {
    "model": "model_id names it",
    "revision": "revision stands beside model_id",
    "code_revision": "the code is packed with the model",
    "tokenizer": "it is the model's own",
    "download_dir": "the work directory has it",
    "enable_sleep_mode": "spare: true seals the engine with it, too",
    "enable_lora": "lora_adapters turns it on",
    "nnodes": "an engine of several machines is not sealed",
}
_QUANTIZE = (
    "vLLM quantizes as it loads, and has nothing that writes the result: leave quantize out, and"
    " give args.quantization, as fp8, or name a model whose weights are quantized"
)


class CanaryConfig(BaseModel):
    """The question that the engine is asked when it is built, and each time it starts."""

    model_config = STRICT

    prompt: Text = PROMPT
    """A text; the answer is greedy."""
    tokens: int = Field(default=TOKENS, ge=1, le=256)
    """How many tokens of the answer are compared."""


class SealedConfig(SourceConfig):
    """A build of a sealed vLLM engine: started on a GPU, and packed with what that compiled."""

    engine: Literal["vllm"]
    """vllm: what runs is vLLM itself, which is asked to compile, and no script."""
    args: dict[str, Any] = {}
    """vLLM's engine arguments, as model.json has them."""
    weights: Literal["packed", "reference"] = "packed"
    """reference leaves the weights out: their source, names and sums are packed, and a server
    fetches them when it starts."""
    lora_adapters: Adapters = {}
    """LoRA adapters by the names that requests have for them: a directory, ORG/NAME of the hub or
    a tar's URL, or these with more keys."""
    canary: CanaryConfig = CanaryConfig()
    """The question, and how much of its answer is compared."""
    env: dict[str, str | int | float] = {}
    """Variables of vLLM, Inductor and NCCL that the engine is built and served with: they are a
    part of what vLLM knows compiled code by."""
    spare: bool = False
    """Whether the engine is sealed twice, the second time as SPARE_ENGINE starts it: one
    that can sleep is another engine for vLLM."""
    sealed: Literal["preferred", "required"] = "preferred"
    """required: a server on which no seal fits refuses the engine (E1305), and compiles nothing."""
    timeout: Seconds | None = None
    """Seconds after which a start of the engine is stopped (E2301)."""

    @model_validator(mode="before")
    @classmethod
    def _without_quantize(cls, value: Any) -> Any:
        if isinstance(value, dict) and "quantize" in value:
            raise ValueError(f"quantize: {_QUANTIZE}")
        return value

    @field_validator("args", "env", "canary", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return {} if value is None else value

    @field_validator("env")
    @classmethod
    def _public(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"{name}: must begin with VLLM_, TORCHINDUCTOR_ or NCCL_")
            if SECRET.search(name):
                raise ValueError(f"{name} may be secret, and a config is packed into engine.tar")
        return value

    @field_validator("args")
    @classmethod
    def _arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _OURS:
                raise ValueError(f"{name}: {_OURS[name]}: leave it out")
            if SECRET_OPTION.search(name):
                raise ValueError(f"{name} may be secret, and a config is packed into engine.tar")
        try:
            return checked_arguments(Path("args"), value)
        except CogTritonError as error:
            raise ValueError(error.detail.removeprefix("args: ")) from None

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the engine, as a process has them."""
        return {name: str(value) for name, value in sorted(self.env.items())}


AnyConfig = BuildConfig | SealedConfig


def load_any(path: Path) -> AnyConfig:
    """Read and check a build config of any engine; raises BuildConfigInvalid as `load_config`."""
    return parse_any(read_text(path), str(path))


def parse_any(text: str, origin: str) -> AnyConfig:
    """Check a build config of any engine, given as YAML text; `origin` names it in errors."""
    raw = load_yaml(text, origin)
    if raw.get("engine") != ENGINE:
        return parse_config(text, origin)
    try:
        return SealedConfig.model_validate(raw)
    except ValidationError as error:
        keys = {
            **known_keys(),
            "": list(SealedConfig.model_fields),
            "canary": list(CanaryConfig.model_fields),
            "lora_adapters": list(AdapterSource.model_fields),
        }
        raise BuildConfigInvalid(f"{origin}: {describe(error, keys)}") from None


def json_schema() -> str:
    """The schema of build configs of all engines, equal for equal versions of this package."""
    sealed, scripts = SealedConfig.model_json_schema(), BuildConfig.model_json_schema()
    definitions = {**scripts.pop("$defs", {}), **sealed.pop("$defs", {})}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cog-triton build config",
        "$defs": dict(sorted(definitions.items())),
        "if": {"properties": {"engine": {"const": ENGINE}}, "required": ["engine"]},
        "then": sealed,
        "else": scripts,
    }
    return json.dumps(schema, indent=2)
