"""Grammar of the double: the derivatives of a regular expression, byte by byte."""

from __future__ import annotations

import json
import re
from typing import Any

EOS = 256
Node = Any
"""("empty",), ("none",), ("bytes", set), ("then", a, b), ("or", a, b) or ("many", a)."""
_EMPTY, _NONE = ("empty",), ("none",)


class Grammar:
    """As vLLM's StructuredOutputGrammar: it advances by what is accepted."""

    def __init__(self, expression: str) -> None:
        self._left = _node(re._parser.parse(expression))
        self._ended = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if token not in self.allowed():
                return False
            self._ended = token == EOS
            self._left = self._left if self._ended else _derivative(self._left, token)
        return True

    def allowed(self) -> set[int]:
        if self._ended:
            return set()
        found = {byte for byte in range(128) if _derivative(self._left, byte) != _NONE}
        return found | {EOS} if _nullable(self._left) else found


def expression_of(params: Any) -> str:
    """A regular expression for a choice, a regex, or an object of strings."""
    if params.choice:
        return "|".join(map(re.escape, params.choice))
    if params.regex:
        return str(params.regex)
    schema = json.loads(params.json) if isinstance(params.json, str) else params.json
    values = [
        rf'"{name}": "[a-z]{{{of.get("minLength", 24)},{of.get("maxLength", 40)}}}"'
        for name, of in schema["properties"].items()
    ]
    return r"\{" + ", ".join(values) + r"\}"


def _node(parsed: Any) -> Node:
    made: Node = _EMPTY
    for operator, value in reversed(list(parsed)):
        made = _then(_part(str(operator), value), made)
    return made


def _part(operator: str, value: Any) -> Node:
    if operator == "LITERAL":
        return ("bytes", frozenset([value]))
    if operator == "ANY":
        return ("bytes", frozenset(range(32, 127)))
    if operator == "IN":
        return ("bytes", frozenset(byte for item in value for byte in _set(*item)))
    if operator == "SUBPATTERN":
        return _node(value[-1])
    if operator == "BRANCH":
        made = _NONE
        for branch in value[1]:
            made = _or(made, _node(branch))
        return made
    assert operator == "MAX_REPEAT", operator
    least, most, inner = value
    one = _node(inner)
    made = ("many", one) if most is re._constants.MAXREPEAT else _EMPTY
    for _ in range(0 if most is re._constants.MAXREPEAT else most - least):
        made = _or(_then(one, made), _EMPTY)
    for _ in range(least):
        made = _then(one, made)
    return made


def _set(operator: Any, value: Any) -> range:
    if str(operator) == "LITERAL":
        return range(value, value + 1)
    assert str(operator) == "RANGE", operator
    return range(value[0], value[1] + 1)


def _then(first: Node, second: Node) -> Node:
    if _NONE in (first, second):
        return _NONE
    return second if first == _EMPTY else first if second == _EMPTY else ("then", first, second)


def _or(first: Node, second: Node) -> Node:
    if first in (_NONE, second):
        return second
    return first if second == _NONE else ("or", first, second)


def _nullable(node: Node) -> bool:
    kind = node[0]
    if kind == "then":
        return _nullable(node[1]) and _nullable(node[2])
    if kind == "or":
        return _nullable(node[1]) or _nullable(node[2])
    return kind in ("empty", "many")


def _derivative(node: Node, byte: int) -> Node:
    kind = node[0]
    if kind == "bytes":
        return _EMPTY if byte in node[1] else _NONE
    if kind == "or":
        return _or(_derivative(node[1], byte), _derivative(node[2], byte))
    if kind == "then":
        made = _then(_derivative(node[1], byte), node[2])
        return _or(made, _derivative(node[2], byte)) if _nullable(node[1]) else made
    if kind == "many":
        return _then(_derivative(node[1], byte), node)
    return _NONE
