"""JSON text inside a request, such as the arguments of a call, parsed within bounds.

The front bounds a body's JSON; to it, such a text is one string.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_VALUES = 1 << 18
MAX_NUMBER = 64
"""Characters of a number: Python takes as long as the square of an integer's digits."""


def parse(text: str, *, strict: bool = True) -> Any:
    """The value of `text`; raises ValueError with the rule that it breaks.

    Without `strict`, strings may have control characters as they are.
    """
    count = count_values(text)
    if count > MAX_VALUES:
        raise ValueError(f"has some {count} values; {MAX_VALUES} at most")
    try:
        value = _DECODERS[strict].decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if count > MAX_DEPTH and not _is_flatter(value):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def count_values(text: str) -> int:
    """At least as many as `text` has values, found without parsing it."""
    return sum(map(text.count, ",[{"))


def _is_flatter(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return not level


def _integer(text: str) -> int:
    return int(_bounded(text))


def _float(text: str) -> float:
    value = float(_bounded(text))
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of numbers")
    return value


def _bounded(text: str) -> str:
    if len(text) > MAX_NUMBER:
        raise ValueError(f"a number has {len(text)} characters; {MAX_NUMBER} at most")
    return text


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODERS = [
    json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_refuse, strict=strict)
    for strict in (False, True)
]
