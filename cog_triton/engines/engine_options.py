"""Options of an engine: a dataclass whose fields have their ranges, read from a serve config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from cog_triton.errors import InvalidPredictorConfig, nearest

Options = TypeVar("Options")
_KINDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "float": (float, "a finite number, "),
    "int": (int, "a whole number, "),
    "bool": (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
}


def option(default: Any, *, least: float = 0, most: float = sys.float_info.max) -> Any:
    """Field of an option that is a number from `least` to `most`."""
    return field(default=default, metadata={"least": least, "most": most})


def out_of_range(item: Field[Any], value: float) -> str:
    """The range of an option, if `value` is outside it; else empty."""
    least, most = item.metadata.get("least", 0), item.metadata.get("most", sys.float_info.max)
    if least <= value <= most:
        return ""
    return f"at least {least}" if most == sys.float_info.max else f"from {least} to {most}"


def read_options(
    kind: Callable[..., Options], arguments: Mapping[str, Any], engine: str
) -> Options:
    """The options of `engine` in a serve config's or a model's arguments; raises E1202."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        where = f"tensorrt_llm.args.{name}={value!r}"
        if name not in known:
            hint = nearest(name, list(known))
            raise InvalidPredictorConfig(f"{where}: {engine} has no such option{hint}")
        values[name] = str(value)
        if (item := known[name]).type in _KINDS:
            read, rule = _KINDS[str(item.type)]
            try:
                values[name] = read(str(value))
            except (ValueError, LookupError):
                values[name] = float("nan")
            if wrong := out_of_range(item, values[name]):
                must = rule if item.type == "bool" else rule + wrong
                raise InvalidPredictorConfig(f"{where}: must be {must}")
    return kind(**values)
