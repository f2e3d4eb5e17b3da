"""Arguments of a step: the words and paths that each value in a build config stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

Scalar = int | float | str
ArgumentValue = bool | Scalar | list[Scalar] | None

_SHOWN_LENGTH = 120
MODEL = "model"
"""The model in the work directory, as configs name it."""
MODELS = "models"
"""Where steps find it in the work directory, under its own name."""
# The original builder's working directory, and its directory of models.
_ROOT = PurePosixPath("/src")
_MODELS = _ROOT / "models"


def command_line(args: Mapping[str, ArgumentValue]) -> list[str]:
    """The words that `args` stand for, in the order given.

    A key without value and ``true`` pass the bare flag ``--key``, ``false`` leaves it out, a
    list passes its items as separate words; anything else, ``0`` and ``""`` included, is a value.
    """
    words: list[str] = []
    for key, value in args.items():
        if value is False:
            continue
        words.append(f"--{key}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not None and value is not True:
            words.append(str(value))
    return words


def shown(value: ArgumentValue) -> str:
    """`value` for a message: one line of limited length."""
    if value is None or isinstance(value, bool):
        return {None: "no value", True: "true", False: "false"}[value]
    return repr(value)[:_SHOWN_LENGTH]


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
