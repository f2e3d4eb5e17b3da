"""Generation config of a model: the defaults of sampling in its generation_config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from cog_triton.errors import InvalidArgument
from cog_triton.system.printable import shortened
from cog_triton.text.sampling import SAMPLING, RequestField

_log = logging.getLogger(__name__)

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "repetition_penalty", "min_p")
"""What is read of it here; vLLM's server reads the same of sampling."""


def load(directory: Path) -> dict[str, Any]:
    """The object in a directory's file; empty if there is none, or a broken one, with a warning."""
    path = directory / FILE
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("must be a JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s: cannot be read, and is ignored: %s", path, error)
        return {}
    return found


def sampling_defaults(found: Mapping[str, Any], abilities: Set[str]) -> dict[str, float]:
    """Values of `NAMES`, for requests without their own; one that breaks a rule is ignored.

    A warning names it. `abilities` are those of `ABILITIES` that the engine has.
    """
    defaults = {}
    for item in SAMPLING:
        if item.name in NAMES and (value := found.get(item.name)) is not None:
            try:
                defaults[item.name] = _checked(item, value, abilities)
            except InvalidArgument as error:
                _log.warning("%s: %s; it is ignored", FILE, error.detail)
    return defaults


def _checked(item: RequestField, value: Any, abilities: Set[str]) -> float:
    whole = item.name == "top_k"
    if type(value) is not int and (whole or type(value) is not float):
        rule = "a whole number" if whole else "a number"
        raise InvalidArgument(f"{item.name}={shortened(value)}: must be {rule}")
    if item.optional and value and item.name not in abilities:
        raise InvalidArgument(f"{item.name}={value}: this engine does not support it")
    number: float = item.read(value)
    item.check(number)
    return number
