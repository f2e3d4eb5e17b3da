"""Error text of an invalid build config: one line for each mistake."""

from __future__ import annotations

import ast
import reprlib
from collections.abc import Mapping

from pydantic import ValidationError

from cog_triton.errors import nearest
from cog_triton.system import redaction

_SHOWN_LENGTH = 120
# A few lines of YAML can mean a list of a billion items: it is shown in part.
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN_LENGTH
_SHOWN.maxlevel = 3
_MAPPINGS = {
    "args": "must be empty, true, false, a number, a text, or a list of numbers and texts",
    "env": "must be a text or a number",
}
PATTERNS = {
    r"^[^\x00\n]*$": "must be one line of text",
    r"^[0-9a-f]{64}$": "must be 64 hexadecimal digits, 0 to 9 and a to f",
    r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)*/?$": "must be a relative path, of letters,"
    " digits, '_', '.' and '-'",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$": "a name begins with a letter or digit, and has no more"
    " than 128 letters, digits, '_', '.' and '-'",
}
"""Rules of a config's patterns, in words."""


def describe(error: ValidationError, known: Mapping[str, list[str]]) -> str:
    """One line per mistake: YAML path, value, rule, and the nearest valid key or value.

    Args:
        known: the keys that there are, at the top (``""``), in a step (``"step"``), and below
            others by their names.
    """
    lines: dict[str, str] = {}
    for found in error.errors(include_url=False):
        loc = [str(part) for part in found["loc"]]
        kind, value = found["type"], _SHOWN.repr(found["input"])
        rule = found["msg"].removeprefix("Value error, ")
        if kind == "string_pattern_mismatch":
            rule = PATTERNS[found["ctx"]["pattern"]]
        elif kind in ("model_type", "dict_type"):
            rule = "must be a mapping, of keys and their values"
        if loc[-1:] == ["model_tar_url"]:
            value = _address(found["input"])
        mapping = next((name for name in loc[:2] if name in _MAPPINGS), None)
        if mapping is not None and len(loc) > loc.index(mapping) + 1:
            # One entry per type the union allows: to the user it is one mistake.
            loc = loc[: loc.index(mapping) + 2]
            rule = _MAPPINGS[mapping]
            value = "" if loc[-1] == "[key]" else value
        is_name = loc[-1:] == ["[key]"] and mapping is None  # of an entry, and the value is that
        where = ".".join(loc[:-1] if is_name else loc)
        if kind == "missing":
            line = f"{where} is missing"
        elif kind == "extra_forbidden":
            keys = known["" if len(loc) == 1 else loc[0] if loc[0] in known else "step"]
            line = f"{where}: unknown key{nearest(loc[-1], keys)}"
        elif kind == "literal_error":
            choices = _choices(found.get("ctx", {}).get("expected", ""))
            near = nearest(str(found["input"]), choices) if isinstance(found["input"], str) else ""
            line = f"{where}: {value[:_SHOWN_LENGTH]}: must be one of {', '.join(choices)}{near}"
        elif loc[-1:] in (["hf_token"], ["env"], ["args"]):
            line = f"{where}: {rule}"  # what may be secret is not shown
        elif is_name:
            line = f"{where}: {rule}"
        elif not where:
            line = rule
        elif isinstance(found["input"], Mapping) and kind == "value_error" and not mapping:
            line = f"{where}.{rule}"  # the rule begins with the key of the step that breaks it
        else:
            line = f"{where}: {value[:_SHOWN_LENGTH]}: {rule}"
        lines.setdefault(where, line)
    return "\n".join(lines.values())


def _address(value: object) -> str:
    """`value`, which should be a URL, redacted."""
    try:
        address = redaction.redact_url(value) if isinstance(value, str) else "***"
    except ValueError:
        address = "***"
    return repr("***" if "@" in address else address)


def _choices(expected: str) -> list[str]:
    """pydantic's ``'a', 'b' or 'c'`` as a list."""
    return [str(ast.literal_eval(text)) for text in expected.replace(" or ", ", ").split(", ")]
