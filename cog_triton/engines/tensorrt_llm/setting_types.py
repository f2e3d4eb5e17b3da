"""Setting types: from YAML, or text as in the original's templates, to values, and to pbtxt.

The notation in config.pbtxt is that of the backend's GetParameter
(triton_backend/inflight_batcher_llm/src/model_state.cc).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

_LISTS = re.compile(r"\s*\{[^{}]*\}(\s*,\s*\{[^{}]*\})*\s*")


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be true or false")


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    raise ValueError("must be a whole number")


def _number(value: Any) -> float:
    if not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            pass
        else:
            if math.isfinite(number):
                return number
    raise ValueError("must be a number")


def _text(value: Any) -> str:
    if not isinstance(value, str) or "${" in value:
        unfilled = isinstance(value, str)
        raise ValueError("is a template that was not filled in" if unfilled else "must be text")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value))


def _wholes(value: Any) -> tuple[int, ...]:
    """4096, "4096,1024" or [4096, 1024]."""
    items = value.split(",") if isinstance(value, str) else value
    items = items if isinstance(items, list | tuple) else [items]
    try:
        return tuple(_whole(item.strip() if isinstance(item, str) else item) for item in items)
    except ValueError:
        raise ValueError("must be whole numbers with commas between") from None


def _groups(value: Any) -> tuple[tuple[int, ...], ...]:
    """ "0,1;2,3", [0, 1] or [[0, 1], [2, 3]]; a group for each instance of the model."""
    if isinstance(value, list) and all(isinstance(item, list) for item in value):
        groups = value
    else:
        groups = value.split(";") if isinstance(value, str) else [value]
    try:
        return tuple(_wholes(group) for group in groups)
    except ValueError:
        raise ValueError(
            "must be whole numbers, `,` between those of an instance and `;` between instances"
        ) from None


def _tree(value: Any) -> tuple[tuple[int, ...], ...]:
    """ "{0, 0}, {0, 1}" or [[0, 0], [0, 1]]."""
    if isinstance(value, str) and _LISTS.fullmatch(value):
        value = [item.split(",") for item in re.findall(r"\{([^{}]*)\}", value)]
    try:
        if isinstance(value, list) and value:
            return tuple(_wholes(list(map(_stripped, path))) for path in value)
    except (TypeError, ValueError):
        pass
    raise ValueError('must be paths of a tree as "{0}, {0, 0}, {0, 1}"')


def _stripped(item: Any) -> Any:
    return item.strip() if isinstance(item, str) else item


Flag = Annotated[bool, BeforeValidator(_flag)]
Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
PathText = Annotated[Path, BeforeValidator(_path)]
Wholes = Annotated[tuple[int, ...], BeforeValidator(_wholes)]
Groups = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_groups)]
Tree = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_tree)]


def notation(name: str, value: Any) -> str:
    """A value in the notation of config.pbtxt."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return str(value)
    if all(isinstance(item, int) for item in value):
        return ",".join(map(str, value))
    if name.endswith("_choices"):
        return ", ".join("{" + ", ".join(map(str, item)) + "}" for item in value)
    return ";".join(",".join(map(str, item)) for item in value)
