"""The JSON schema of build configs, for editors."""

from __future__ import annotations

import json

from cog_triton.build.config import BuildConfig


def as_json() -> str:
    """The schema's text, equal for equal versions of this package."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **BuildConfig.model_json_schema(),
        "title": "cog-triton build config",
    }
    return json.dumps(schema, indent=2)
