"""Tool calls that are JSON: their names, and their arguments as the model wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from cog_triton.text import client_json

_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_GAP = re.compile(r"[ \t\n\r]*[,:{]?[ \t\n\r]*")
_NAME = re.compile(r"[\w.-]{1,128}")
_ARGUMENTS = ("arguments", "parameters")
_decode = json.JSONDecoder().raw_decode


def plain(text: str) -> str:
    """JSON text with the control characters within its strings escaped, as models forget to."""
    return _QUOTED.sub(lambda string: string[0].translate(_CONTROLS), text)


def arguments_of(text: str) -> str:
    """The JSON object that `text` is, as `plain`; raises ValueError if it is none."""
    value = client_json.parse(text := plain(text.strip()))
    if not isinstance(value, dict):
        raise ValueError("arguments must be an object")
    json.dumps(value, ensure_ascii=False).encode()  # raises for what UTF-8 cannot have
    return text


def read_calls(text: str, tools: Collection[str] | None = None) -> list[tuple[str, str]]:
    """Names and arguments of a call, or of a list of calls; raises ValueError if one is none.

    A call is ``{"name": "f", "arguments": {}}``; Llama calls them ``parameters``. They may also be
    JSON within a string; without any, they are ``{}``. Other keys are ignored. With `tools`, a call
    is one of these, and has arguments.
    """
    value = client_json.parse(text := plain(text))
    found, place = [], 0
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            raise ValueError("a call must be an object")
        members, place = _members(text, text.index("{", place))
        name = item.get("name")
        key = next((key for key in _ARGUMENTS if item.get(key) not in (None, "")), None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError("a call must have a name")
        if tools is not None and (name not in tools or key is None):
            raise ValueError("not a call of a tool")
        given: Any = item.get(key) if key else "{}"
        found.append((name, arguments_of(given if isinstance(given, str) else members[str(key)])))
    return found


def _members(text: str, place: int) -> tuple[dict[str, str], int]:
    """The members of the valid object at `place`, each value as it is written; and its end."""
    members = {}
    while text[place := _gap(text, place)] != "}":
        key, place = _decode(text, place)
        start = _gap(text, place)
        _, place = _decode(text, start)
        members[key] = text[start:place]
    return members, place + 1


def _gap(text: str, place: int) -> int:
    """Where the next key or value begins, behind one separator; or where the object ends."""
    return next(_GAP.finditer(text, place)).end()
