"""LoRA adapters of a build config: where each comes from, and what its engine must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from cog_triton.artifact.engine_manifest import AdapterName
from cog_triton.builder.arguments import ArgumentValue, shown
from cog_triton.engines.tensorrt_llm.adapter_modules import HF_MODULES

_Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00\n]*$")]
_OFF = (False, "disable")


class AdapterSource(BaseModel):
    """Where an adapter comes from; a text alone is its `source`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    source: _Text
    """A directory, ORG/NAME of the hub, or the URL of a tar (http(s), s3, gs, az, file)."""
    revision: _Text | None = None
    """Branch, tag or commit on the hub; main if left out."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the tar, in hexadecimal; another content is refused."""


def _as_source(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


Adapters = Annotated[
    dict[
        AdapterName,
        Annotated[
            AdapterSource, BeforeValidator(_as_source, json_schema_input_type=_Text | AdapterSource)
        ],
    ],
    Field(max_length=256),
]


def problem(args: Mapping[str, ArgumentValue]) -> str | None:
    """Why an engine that is built with `args` takes no adapters, None if it takes some."""
    if args.get("lora_plugin", False) in _OFF:
        return "build.args.lora_plugin must be set, as auto: without it an engine takes no adapters"
    targets = target_modules(args)
    if not targets:
        return (
            "build.args.lora_target_modules must list the modules that adapters change, of"
            f" {', '.join(HF_MODULES)}"
        )
    unknown = [name for name in targets if name not in HF_MODULES]
    if unknown:
        return (
            f"build.args.lora_target_modules: {shown(unknown[0])}: adapters are of"
            f" {', '.join(HF_MODULES)}"
        )
    return None


def target_modules(args: Mapping[str, ArgumentValue]) -> list[str]:
    """`lora_target_modules` of trtllm-build's arguments."""
    value = args.get("lora_target_modules")
    return [str(item) for item in value] if isinstance(value, list) else [str(value)] * bool(value)
