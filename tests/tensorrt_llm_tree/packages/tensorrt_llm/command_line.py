"""Command line of a script with its real options, which are in options.json beside this file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TYPES: dict[str | None, Any] = {None: None, "str": str, "int": int, "float": float}
_FLAGS = {"True": True, "False": False, None: None}


def parser_of(script: str) -> argparse.ArgumentParser:
    """The parser of `script`, which is a path below the examples or a command's name."""
    described = json.loads((Path(__file__).parent / "options.json").read_text())[script]
    parser = argparse.ArgumentParser()
    for option in described:
        _add(parser, option)
    return parser


def _add(parser: argparse.ArgumentParser, option: dict[str, Any]) -> None:
    names = [f"--{name}" for name in option["names"]]
    settings: dict[str, Any] = {"required": option["required"], "default": option["default"]}
    if option["default"] == argparse.SUPPRESS:
        settings["default"] = argparse.SUPPRESS  # argparse knows it by identity
    if option["nargs"] == 0:
        flag = "store_false" if option["default"] == "True" else "store_true"
        settings |= {"action": flag, "default": _FLAGS.get(option["default"], option["default"])}
    else:
        kind = _TYPES[option["type"]] if option["type"] in _TYPES else _named(option["type"])
        choices = option["choices"]
        if choices is not None:
            choices = [kind(choice) if kind else choice for choice in choices]
        settings |= {"type": kind, "choices": choices, "nargs": option["nargs"]}
        if option["nargs"] == "?":
            settings["const"] = True  # what it stands for is not recorded
    parser.add_argument(*names, **settings)


def _named(kind: str) -> Callable[[str], str]:
    """A type of the script's own; here it takes any text."""

    def convert(text: str) -> str:
        return text

    convert.__qualname__ = kind.removesuffix("()")
    return convert
