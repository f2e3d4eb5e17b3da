"""Bounds of text: what multiplies or compares a client's text is bounded, and linear below that.

docs/security.md, "Bounds of text", lists them. Each case is the worst input known for one of them.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from layers import full
from text_cases import CASES, Case, assert_linear, fed

import cog_triton.pictures
import cog_triton.serving
import cog_triton.text
from cog_triton import errors
from cog_triton.engines.openvino import guide_bounds
from cog_triton.serving.openai.parsers.call_parser import (
    CALL_PARSERS,
    CallParser,
    NamedCallParser,
    RequiredCallsParser,
)
from cog_triton.system import log_notes, public_addresses

PARSERS: dict[str, Callable[[], CallParser]] = {
    **{
        name: (lambda kind=kind: kind(["f"]))  # type: ignore[misc]
        for name, kind in CALL_PARSERS.items()
    },
    "required": lambda: RequiredCallsParser(["f"]),
    "named": lambda: NamedCallParser(["f"]),
}
ANSWERS = {
    "braces": ("", "{"),
    "angles": ("", "<"),
    "space": ("", " "),
    "tags": ("", "<tool_call>"),
    "markers": ("", "[TOOL_CALLS]"),
    "python tags": ("", "<|python_tag|>"),
    "empty calls": ("", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "calls of Llama": ("", '{"name": "f", "parameters": {}};'),
    "calls of Mistral": ("[TOOL_CALLS][", '{"name": "f", "arguments": {}},'),
    "a long argument": ('<tool_call>{"name": "f", "arguments": {"a": "', "x"),
    "an early argument": ('<tool_call>{"arguments": {"a": "', "x"),
    "an argument in a string": ('<tool_call>{"name": "f", "arguments": "', '\\"'),
    "a long key": ('<tool_call>{"', "x"),
    "space behind a call": ('<tool_call>{"name": "f"}', " "),
    "a long number": ('<tool_call>{"name": "f", "arguments": {"a": ', "9"),
    "a head of Mistral": ("[TOOL_CALLS]", "f"),
    "escapes": ('{"a": "', "\\u0041"),
}


def parsed_in(answer: str, parser: str, *, at_once: bool) -> Case:
    opening, repeated = ANSWERS[answer]

    def pieces(length: int) -> list[str]:
        count = length // len(repeated)
        return [opening, *([repeated * count] if at_once else [repeated] * count)]

    return Case(1 << 13, pieces, lambda made: fed(PARSERS[parser](), iter(made)))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notes about names: they are bounded, and slow."""
    monkeypatch.setattr(log_notes, "_noted", {f"full {number}" for number in range(200)})


@pytest.mark.parametrize("name", list(CASES))
def test_cpu_is_linear_up_to_the_bound(name: str) -> None:
    assert_linear(CASES[name])


@pytest.mark.parametrize("answer", list(ANSWERS))
@pytest.mark.parametrize("parser", list(PARSERS))
@pytest.mark.parametrize("at_once", [False, full(True)], ids=["in tokens", "at once"])
def test_parsers_of_answers_are_linear(parser: str, answer: str, at_once: bool) -> None:
    assert_linear(parsed_in(answer, parser, at_once=at_once))


# The regular expressions on clients' texts and engines', and how they are used.
PATTERNS = {
    "engines.openvino.guide_bounds._RANGE": ("search",),
    "engines.openvino.guide_bounds._TOKEN": ("match",),
    "errors._CODED": ("search",),
    "pictures.image_limits._FILL": ("match",),
    "pictures.image_limits._DATA_URL": ("match",),
    "serving.adapter_store._NAME": ("fullmatch",),
    "serving.openai.request_body._MESSAGE": ("match",),
    "serving.openai.request_body._TOOL": ("match",),
    "serving.openai.parsers.call_parser._GAP": ("match",),
    "serving.openai.parsers.call_parser._NAME": ("fullmatch",),
    "serving.openai.parsers.call_parser._QUOTED": ("search",),
    "serving.openai.parsers.call_parser._HERMES": ("match",),
    "serving.openai.parsers.call_parser._LIST": ("match",),
    "serving.openai.parsers.call_parser._LLAMA": ("match",),
    "serving.openai.parsers.call_parser._MISTRAL": ("match",),
    "serving.openai.parsers.call_parser._OBJECT": ("match",),
    "serving.openai.parsers.call_parser._OPEN_FORCED": ("fullmatch",),
    "serving.openai.parsers.call_parser._OPEN_HERMES": ("fullmatch",),
    "serving.openai.parsers.call_parser._OPEN_LLAMA": ("fullmatch",),
    "serving.openai.parsers.call_parser._OPEN_MISTRAL": ("fullmatch",),
    "system.public_addresses.HTTP_URL": ("fullmatch",),
    "text.detokenize._BYTE_TOKEN": ("fullmatch",),
    "text.guide._ESCAPED": ("search",),
    "text.guide._SPECIAL": ("search",),
    "text.sse._NAME": ("search",),
    "engines.openvino.guide_bounds.NAME": ("fullmatch",),
}
LENGTH = 1 << 12
LONG_S = 0.01


def patterns() -> dict[str, re.Pattern[Any]]:
    """Patterns of the modules that read such texts, by the name of the module that has each."""
    found: dict[str, re.Pattern[Any]] = {}
    modules: list[ModuleType] = [errors, public_addresses, guide_bounds]
    for package in (cog_triton.text, cog_triton.serving, cog_triton.pictures):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            modules.append(importlib.import_module(module.name))
    for place in modules:
        for name, value in vars(place).items():
            if isinstance(value, re.Pattern) and value not in found.values():
                found[f"{place.__name__.removeprefix('cog_triton.')}.{name}"] = value
    return found


def attacks(pattern: str) -> Iterator[tuple[str, str]]:
    """Openings, and one or two parts to repeat, of what the pattern is made of, without an end."""
    words = re.findall(r"[A-Za-z]{3,}|\[[A-Z_]+\\\]", pattern)
    parts = {*"a0 \\\"'\n.,;=-[(:/@%<E\xff", *(word.replace("\\", "") for word in words)}
    for one, two in itertools.product(sorted(parts), repeat=2):
        for opening in ("", "data:", "http://", "[", '"', "E1000 a", "{1"):
            yield opening, one + two


def test_every_pattern_is_listed() -> None:
    assert sorted(patterns()) == sorted(PATTERNS)


@pytest.mark.parametrize("name", list(PATTERNS))
def test_no_pattern_backtracks(name: str) -> None:
    """A quadratic one takes 50 ms for such a text; a linear one, a fraction of a millisecond.

    What takes long is measured at other lengths, as it may be the machine that is slow.
    """
    pattern = patterns()[name]
    for opening, part in attacks(str(pattern.pattern)):

        def text(length: int, opening: str = opening, part: str = part) -> Any:
            made = opening + part * (length // len(part)) + "\0"
            return made.encode("latin-1") if isinstance(pattern.pattern, bytes) else made

        value = text(LENGTH)
        for use in PATTERNS[name]:
            replace = partial(pattern.sub, value[:0])
            work = replace if use == "search" else getattr(pattern, use)
            started = time.thread_time()
            work(value)
            if time.thread_time() - started > LONG_S:
                assert_linear(Case(4 * LENGTH, text, work))


# Beyond the bounds: the error, and its rule.
