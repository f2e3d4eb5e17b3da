"""Legacy paths: absolute ones in the original builder's image, mapped to the work directory."""

from __future__ import annotations

from pathlib import PurePosixPath

MODEL = "model"
"""The model in the work directory, whatever the config builds."""
# The original builder's working directory, and its directory of models.
_ROOT = PurePosixPath("/src")
_MODELS = _ROOT / "models"


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
