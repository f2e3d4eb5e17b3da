"""Names and values from files and clients: safe for a terminal, and no longer than is shown."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_SHOWN = 80


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters, line ends included, as escapes, but for those to `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def shortened(value: object) -> str:
    """The repr of `value` in at most 80 characters, without making all of it."""
    text = repr(_start(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def first_problem(error: ValidationError) -> str:
    """The first rule that a document breaks, behind the key and its value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(printable(str(part)[:_SHOWN]) for part in first["loc"]) or "the document"
    value = "missing" if first["type"] == "missing" else shortened(first["input"])
    return f"{where}: {value}: {first['msg'].removeprefix('Value error, ')}"


def _start(value: object) -> object:
    """What `value` begins with, longer than is shown: the repr of 32768 floats takes 0.3 s."""
    if isinstance(value, str):
        return value[:_SHOWN]
    if isinstance(value, list):
        return [_start(item) for item in value[:_SHOWN]]
    if isinstance(value, dict):
        return {_start(key): _start(item) for key, item in islice(value.items(), _SHOWN)}
    return value
