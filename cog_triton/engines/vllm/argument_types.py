"""Names and types of vLLM's arguments, recorded from its source by ``scripts/record_vllm.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORD: Mapping[str, Any] = json.loads(
    (Path(__file__).parent / "argument_types.json").read_text("utf-8")
)
VERSION: str = RECORD["source"]["version"]
Kinds = Sequence[str]

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "an object",
    "null": "null",
}


def convert(value: Any, kinds: Kinds) -> Any:
    """Convert `value` to one of `kinds`; raises ValueError with the rule that it breaks.

    Text is parsed where only numbers, booleans, lists or objects are allowed: clients of Triton's
    vllm_backend send all of them as text.
    """
    if isinstance(value, str) and "str" not in kinds:
        value = _parse(value, kinds)
    if not kinds or any(_is(value, kind) for kind in kinds):
        return float(value) if type(value) is int and _only_float(kinds) else value
    choices = [kind[1:] for kind in kinds if kind.startswith("=")]
    words = [word for kind, word in _WORDS.items() if kind in kinds and kind != "null"]
    null = ["null"] if "null" in kinds else []
    raise ValueError("must be " + " or ".join([*words, *choices, *null]))


def _only_float(kinds: Kinds) -> bool:
    return "float" in kinds and "int" not in kinds


def _parse(text: str, kinds: Kinds) -> Any:
    if f"={text}" in kinds:
        return text
    try:
        return json.loads(text.lower() if "bool" in kinds else text)
    except ValueError:
        return text


def _is(value: Any, kind: str) -> bool:
    if kind.startswith("="):
        return not isinstance(value, bool) and str(value) == kind[1:]
    if isinstance(value, bool):
        return kind == "bool"
    types: dict[str, Any] = {
        "int": int,
        "float": (int, float),
        "str": str,
        "list": list,
        "dict": dict,
        "null": type(None),
    }
    return kind == "any" or (kind in types and isinstance(value, types[kind]))
