"""JSON files of a model, which come from anyone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cog_triton.errors import ModelUnavailable


def read_object(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the model `name`; raises E1304 if it is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{name}: {path.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelUnavailable(f"{name}: {path.name} is not a JSON object")
    return value
