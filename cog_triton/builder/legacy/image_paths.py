"""Legacy paths: absolute ones in the original builder's image, mapped to the work directory."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

MODEL = "model"
"""The model in the work directory, as configs name it."""
MODELS = "models"
"""Where steps find it in the work directory, under its own name."""
# The original builder's working directory, and its directory of models.
_ROOT = PurePosixPath("/src")
_MODELS = _ROOT / "models"


def named(model_id: str) -> str:
    """Where steps find the model in the work directory: ``models/ORG/NAME``.

    Scripts of TensorRT-LLM look for the kind of a model in the name of its directory.
    """
    path = PurePosixPath(model_id.removeprefix("pypi:").partition("==")[0])
    is_path = path.is_absolute() or model_id.startswith((".", "~"))
    parts = [path.name] if is_path or ".." in path.parts else path.parts
    name = "/".join(re.sub(r"[^\w.-]", "-", part) for part in parts)
    return f"{MODELS}/{name.strip('/.') or MODEL}"


def relative(text: str) -> str:
    """``/src/...`` as the path in the work directory that takes its place; else `text`."""
    path = PurePosixPath(text)
    if path != _ROOT and path.is_relative_to(_ROOT):
        return str(path.relative_to(_ROOT))
    return text


def resolved(text: str, model_id: str, model: str) -> str:
    """`text` with a legacy path of the model, or of the work directory, replaced."""
    if PurePosixPath(text) == _MODELS / model_id:
        return model
    return relative(text)
