"""Paths as the older builder's configs have them: absolute, in the image that it ran in."""

from __future__ import annotations

from pathlib import PurePosixPath

MODEL = "model"
"""The model in the work directory, whatever the config builds."""
# Its working directory, and where it put models.
_ROOT = PurePosixPath("/src")
_MODELS = _ROOT / "models"


def relative(text: str) -> str:
    """``/src/...`` as the path in the work directory that takes its place; else `text`."""
    path = PurePosixPath(text)
    if path != _ROOT and path.is_relative_to(_ROOT):
        return str(path.relative_to(_ROOT))
    return text


def resolved(text: str, model_id: str, model: str) -> str:
    """`text` with the older builder's path of the model, or of its work directory, replaced."""
    if PurePosixPath(text) == _MODELS / model_id:
        return model
    return relative(text)
