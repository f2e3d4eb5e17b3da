"""Records that are the same in every run of a server, by normal.yaml, and their diff."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

WIDTH = 140
_RULES = yaml.safe_load(Path(__file__).with_name("normal.yaml").read_text("utf-8"))
_PATTERNS = [(re.compile(pattern), text) for pattern, text in _RULES["patterns"]]
_ID, _CALL, _VERSION = (re.compile(_RULES[name]) for name in ("id", "call", "version"))
_TIMED, _TEXTS, _LISTS = (frozenset(_RULES[name]) for name in ("timed", "texts", "lists"))


class Normal:
    """Makes the records of one case; `places` are texts of this run, such as ports, with a name."""

    def __init__(self, places: dict[str, str], either: list[str]) -> None:
        self._places = places
        self._either = either
        """Texts of which a race in the server decides; the first is recorded for all."""
        self._ids: dict[str, str] = {}
        self.cut = 0
        """Characters that are kept of what the model says, where it was cut off; 0: all."""

    def __call__(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return self._object(value)
        if isinstance(value, list):
            if key == "output" and value and all(isinstance(each, str) for each in value):
                value = ["".join(value)]
            return [self(each, "text" if key == "output" else "") for each in value]
        if isinstance(value, str):
            if key in _TIMED or (key == "version" and _VERSION.fullmatch(value)):
                return f"<{key}>"
            if key in _RULES["calls"] and _CALL.fullmatch(value):
                return self._numbered(value, "call")
            return self._text(value)[: self.cut or None if key in _TEXTS else None]
        if key in _TIMED and isinstance(value, int | float) and not isinstance(value, bool):
            return f"<{key}>"
        return value

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        found = {name: self(each, name) for name, each in value.items()}
        if found.get("mode") and found.get("name") in _TIMED:  # of an event `metric`
            found["value"] = f"<{found['name']}>"
        return found

    def _text(self, text: str) -> str:
        for part, name in self._places.items():
            text = text.replace(part, name)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        for other in self._either[1:]:
            text = text.replace(other, self._either[0])
        return _ID.sub(lambda found: self._numbered(found[0], found[1].rstrip("-_")), text)

    def _numbered(self, name: str, kind: str) -> str:
        same = sum(each.startswith(f"<{kind} ") for each in self._ids.values())
        return self._ids.setdefault(name, f"<{kind} {same + 1}>")

    def headers(self, headers: dict[str, str]) -> dict[str, Any]:
        """Those that have another value than usual."""
        if "allow" in headers:  # a set, in any order
            headers = {**headers, "allow": ", ".join(sorted(headers["allow"].split(", ")))}
        usual, uncompared = _RULES["usual"], _RULES["uncompared"]
        names = sorted({*headers, *usual}.difference(uncompared))
        found = {name: self(headers.get(name), name) for name in names}
        return {name: found[name] for name in names if found[name] != usual.get(name, "")}

    def events(self, events: list[tuple[str, Any]]) -> list[Any]:
        """Events in their order, the pieces of a text joined."""
        joined: list[Any] = []
        for name, data in _in_groups(_counted(self(_by_choice(events)))):
            if joined and joined[-1][0] == name and isinstance(data, dict):
                both = _joined(joined[-1][1], data)
                if both is not None:
                    joined[-1][1] = both
                    continue
            joined.append([name, data])
        joined = [[name, self(data)] for name, data in joined]
        return [{name: data} if name else data for name, data in joined]


def _by_choice(events: list[tuple[str, Any]]) -> list[list[Any]]:
    """Chunks of several choices one choice after the other: they come in any order."""

    def choice(event: tuple[str, Any]) -> int:
        choices = event[1].get("choices") if isinstance(event[1], dict) else None
        return int(choices[0]["index"]) if choices else 99

    several = any(0 < choice(event) < 99 for event in events)
    return [list(event) for event in (sorted(events, key=choice) if several else events)]


def _counted(events: list[list[Any]]) -> Iterator[list[Any]]:
    """Events without their numbers, where these count them without a gap."""
    place = outputs = 0
    for name, data in events:
        if isinstance(data, dict):
            if data.get("sequence_number") == place:
                data["sequence_number"] = "<next>"
                place += 1
            if name == "output" and data.get("index") == outputs:
                data["index"] = "<next>"
                outputs += 1
        yield [name, data]


def _in_groups(events: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Of logs and metrics that come together first the text of all logs, then all metrics."""
    logs: list[list[Any]] = []
    metrics: dict[str, Any] = {}
    for name, data in [*events, ["", None]]:
        if name == "log":
            logs.append([name, data])
        elif name == "metric" and data.get("mode") == "replace" and len(data) == 3:
            metrics[data["name"]] = data["value"]
        else:
            yield from logs
            if metrics:
                yield ["metric", metrics]
            logs, metrics = [], {}
            if name or data is not None:
                yield [name, data]


def _joined(one: Any, other: Any, key: str = "") -> Any:
    """Two values as one where they differ in a piece of a text only, else None."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return None
        found = {name: _joined(one[name], other[name], name) for name in one}
        lost = any(found[name] is None and one[name] is not None for name in one)
        return None if lost else found
    if isinstance(one, str) and isinstance(other, str) and key in {*_TEXTS, *_RULES["logs"]}:
        return one + other
    if isinstance(one, list) and isinstance(other, list):
        if key in _LISTS:
            return one + other
        if len(one) == len(other):
            found = [_joined(a, b) for a, b in zip(one, other, strict=True)]
            return None if None in found else found
        return None
    if key in _RULES["counts"]:
        return other
    return one if one == other and type(one) is type(other) else None


def differences(expected: Any, found: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two records differ: the field's path, what was expected, and what was found."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in [*expected, *(name for name in found if name not in expected)]:
            inner = f"{path}.{name}" if path else str(name)
            if name not in found or name not in expected:
                yield inner, expected.get(name, "(absent)"), found.get(name, "(absent)")
            else:
                yield from differences(expected[name], found[name], inner)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for place, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif expected != found or type(expected) is not type(found):
        yield path, expected, found


def written(value: Any, indent: int = 0) -> str:
    """JSON with a line for what fits into one."""
    short = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or len(short) + indent <= WIDTH:
        return short
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(n)}: {written(v, indent + 1)}" for n, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{' ' * indent}}}"
    return "[\n" + ",\n".join(pad + written(v, indent + 1) for v in value) + f"\n{' ' * indent}]"
