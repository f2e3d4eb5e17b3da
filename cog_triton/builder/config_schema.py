"""JSON schema of build configs, for editors, and tables of their keys, for readers."""

from __future__ import annotations

import json

from pydantic import BaseModel

from cog_triton.builder.adapter_config import AdapterSource
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.engines.tensorrt_llm.runtime_settings import RuntimeSettings


def as_json() -> str:
    """The schema's text, equal for equal versions of this package."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **BuildConfig.model_json_schema(),
        "title": "cog-triton build config",
    }
    return json.dumps(schema, indent=2)


def as_markdown() -> str:
    """docs/build.md's tables of keys."""
    return (
        "Of the config:\n\n"
        f"{_table(BuildConfig)}\n"
        "Of each step (`convert`, `quantize`, `build`):\n\n"
        f"{_table(StepConfig)}\n"
        "Of `runtime`, with the values that [the serve config](serve-config.md) has for them:\n\n"
        f"{_table(RuntimeSettings)}\n"
        "Of each of `lora_adapters`:\n\n"
        f"{_table(AdapterSource)}"
    )


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | meaning |", "|---|---|"]
    for name, field in model.model_fields.items():
        required = " **Required.**" if field.is_required() else ""
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {meaning}{required} |")
    return "\n".join(rows) + "\n"
