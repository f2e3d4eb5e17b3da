"""Bounds of text: what multiplies or compares a client's text is bounded, and linear below that.

docs/security.md, "Bounds of text", lists them. Each case is the worst input known for one of them.
"""

from __future__ import annotations

import base64
import copy
import gc
import importlib
import itertools
import json
import logging
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from small_tokenizers import byte_fallback, byte_level

import cog_triton.images
import cog_triton.serving
import cog_triton.text
from cog_triton import errors
from cog_triton.errors import BadMessages, CogTritonError, InvalidArgument, nearest
from cog_triton.images.image_header import read_header
from cog_triton.images.image_limits import ImageLimits, read_data_url
from cog_triton.serving.generation import GenerationRequest
from cog_triton.serving.openai import requests
from cog_triton.serving.openai.embeddings import EmbeddingsRequest
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import CallParser
from cog_triton.serving.openai.parsers.deltas import Content, merge
from cog_triton.serving.openai.parsers.guided_calls import NamedCallParser, RequiredCallsParser
from cog_triton.serving.openai.parsers.parser_choice import CALL_PARSERS
from cog_triton.serving.openai.parsers.reasoning import ReasoningParser
from cog_triton.serving.openai.request_body import parse_body
from cog_triton.serving.openai.requests import ChatRequest, CompletionRequest
from cog_triton.serving.openai.responses_request import translate
from cog_triton.serving.openai.sequences import MAX_LOG_PROBS, check_log_probs
from cog_triton.serving.openai.tool_requests import MAX_TOOLS, Tool, functions
from cog_triton.system import log_notes, public_addresses
from cog_triton.system.log_notes import MAX_UNKNOWN, UnknownNames
from cog_triton.system.printable import shortened
from cog_triton.text import chat, client_json, prompts, stop_strings
from cog_triton.text.detokenize import Detokenizer
from cog_triton.text.guide import Guide, choice_guide
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.sse import EventSplitter
from cog_triton.text.stop_strings import StopMatcher, WordLimits
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.text.tool_schema import ToolFunction, arguments_guide, calls_guide

BODY = 8 << 20
VALUES = 32768
USER = [{"role": "user", "content": "x"}]
BYTES = byte_fallback()
TEXT = EngineTokenizer(byte_level())
Work = Callable[[], object]


def cpu(work: Work) -> float:
    """Seconds of CPU that `work` takes, whatever coded error it ends with; best of five."""
    found = []
    gc.collect()
    gc.disable()
    for _ in range(5):
        started = time.thread_time()
        try:
            work()
        except CogTritonError as error:
            assert len(str(error)) < 2000  # noqa: PT017
        found.append(time.thread_time() - started)
    gc.enable()
    return min(found)


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": USER, **more}


def parse_chat(**more: Any) -> object:
    return requests.parse(ChatRequest, chat_body(**more))


def parse_raw(raw: bytes) -> object:
    return parse_body(bytearray(raw))


def render(template: str, prompt: str = "x") -> object:
    return prompts.render(
        prompt, None, request_template=template, default_template=None, tokenizer=TEXT
    )


def tools(count: int) -> list[dict[str, Any]]:
    named = ({"name": f"{number:064}"} for number in range(count))
    return [{"type": "function", "function": function} for function in named]


def call(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [*USER, {"role": "assistant", "tool_calls": [{"function": function}]}]


def fed(parser: Any, pieces: Iterator[str]) -> None:
    for piece in pieces:
        parser.feed(piece)
    parser.finish()


def compiled(stops: list[str]) -> None:
    stop_strings._fallback.cache_clear()
    StopMatcher(stops)


def stopped(text: str) -> None:
    matcher = StopMatcher(STOPS)
    matcher.feed(text)
    matcher.flush()


def in_parts(stream: bytes) -> None:
    splitter = EventSplitter()
    for start in range(0, len(stream), PART_BYTES):
        splitter.feed(stream[start : start + PART_BYTES])


def broken_image(data: bytes) -> None:
    with pytest.raises(ValueError, match="is broken"):
        read_header(data)


def detokenized(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    for token in ids:
        detokenizer.feed([token])
    detokenizer.flush()


def schema(**more: Any) -> Guide:
    return Guide("json_schema", json.dumps({"type": "object", **more}))


BYTE_TOKEN = BYTES.token_to_id("<0xE2>")
STOPS = [f"{'a' * 1000}{number}" for number in range(64)]
NAMED = {"type": "function", "function": {"name": "z" * 64}}
JPEG = b"\xff\xd8\xff"
PART_BYTES = 1 << 14


class Case(NamedTuple):
    """The worst input of a size, up to the limit, and what is done to it."""

    limit: int
    make: Callable[[int], Any]
    work: Callable[[Any], object]


def fields(value: dict[str, Any]) -> object:
    return requests.parse(ChatRequest, chat_body(**value))


def completion(prompt: Any) -> object:
    return requests.parse(CompletionRequest, {"model": "m", "prompt": prompt})


def said(content: Any) -> object:
    return chat.parse_messages([{"role": "user", "content": content}])


def data_url(rest: str) -> object:
    return read_data_url("w", f"data:{rest}", ImageLimits())


def tool_functions(count: int) -> list[ToolFunction]:
    return functions([Tool(**tool) for tool in tools(count)])


def large_function(count: int) -> ToolFunction:
    parameters = {"properties": {f"k{number}": True for number in range(count)}}
    return ToolFunction("w", "f", parameters, strict=False)


def hermes(count: int) -> AnswerParser:
    return AnswerParser(None, CALL_PARSERS["hermes"]([str(number) for number in range(count)]))


def chain(count: int) -> Guide:
    """Definitions that each refer to the two that follow."""
    definitions: dict[str, Any] = {f"d{number}": {"type": "null"} for number in range(count + 3)}
    for number in range(count):
        following = [{"$ref": f"#/$defs/d{number + step}"} for step in (1, 2)]
        definitions[f"d{number}"] = {"anyOf": following}
    return schema(**{"$defs": definitions})


def long_name(count: int) -> Guide:
    return schema(**{"$defs": {"x" * (count // 2): {"anyOf": [True] * (count // 12)}}})


def properties(count: int) -> Guide:
    known = [f"k{number}" for number in range(count)]
    return schema(properties={name: {"type": "string"} for name in known}, required=known)


def names(count: int) -> dict[str, int]:
    return {f"messagez{number}x": 0 for number in range(count)}


def regex(text: str) -> object:
    return Guide("regex", text).check("w")


def checked(guide: Guide) -> object:
    return guide.check("w")


def arguments(text: str) -> object:
    return chat.parse_messages(call(f'{{"a":{text}}}'))


def spaces(count: int) -> None:
    parser = ReasoningParser("<think>", "</think>", opened=False)
    fed(parser, itertools.repeat(" ", count))


def reasoned(count: int) -> None:
    fed(ReasoningParser("<think>", "</think>", opened=True), itertools.repeat("<", count))


def split_words(text: str) -> object:
    return WordLimits(64, 1024).parse("stop_sequences", text)


def listed(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def few_choices(count: int) -> list[str]:
    return ["(" * (count // 256)] * 256


NEAR = [{"type": "function", "function": {"name": "z" * 60 + f"{i:04}"}} for i in range(MAX_TOOLS)]
DEEP = call('{"a":' * 64 + "0" + "}" * 64)
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
PART = {"type": "text", "text": "x" * (BODY // 4096)}

CASES = {
    # What a body has, by name.
    "unknown fields": Case(VALUES // 2, names, fields),
    "unknown keys of a message": Case(
        VALUES, lambda n: [{**USER[0], **names(n)}], chat.parse_messages
    ),
    "unknown keys of all messages": Case(
        4096,
        lambda n: [{**USER[0], f"k{number}": 0} for number in range(n)],
        chat.parse_messages,
    ),
    "keys of an option": Case(VALUES, lambda n: {"stream_options": names(n)}, fields),
    "keys of a part": Case(VALUES, lambda n: [{"type": "text", **names(n)}], said),
    "one long unknown field": Case(BODY, lambda n: {"m" * n: 0}, fields),
    "a value that is shown": Case(BODY, lambda n: {"temperature": "\x7f" * n}, fields),
    "values that are shown": Case(VALUES, lambda n: {"temperature": [0.1234567] * n}, fields),
    "a role that is shown": Case(
        BODY, lambda n: [{"role": "\x7f" * n, "content": "x"}], chat.parse_messages
    ),
    "bias of token ids": Case(
        1024,
        lambda n: {str(number): 1.0 for number in range(n)},
        lambda bias: requests.parse(ChatRequest, chat_body(logit_bias=bias)).sampling(),
    ),
    "token ids": Case(VALUES * 8, lambda n: [7] * n, completion),
    "token ids, the last none": Case(VALUES * 8, lambda n: [*[7] * n, None], completion),
    "inputs of embeddings": Case(
        VALUES * 8,
        lambda n: {"model": "m", "input": [7] * n},
        lambda body: requests.validate(EmbeddingsRequest, body),
    ),
    "floats of a body": Case(
        VALUES, lambda n: listed("0.1234567890123456789012", n).encode(), parse_raw
    ),
    "nested empty lists of a body": Case(VALUES, lambda n: listed("[]", n).encode(), parse_raw),
    # Messages.
    "messages": Case(4096, lambda n: USER * n, chat.parse_messages),
    "parts of a message": Case(4096, lambda n: [PART] * n, said),
    "long integers of arguments": Case(BODY // 4301, lambda n: listed("9" * 4300, n), arguments),
    "integers of arguments": Case(200_000, lambda n: listed("9" * 31, n), arguments),
    "values of arguments": Case((1 << 17) - 2, lambda n: listed("[]", n), arguments),
    "one integer of arguments": Case(BODY, lambda n: "9" * n, arguments),
    "depth of arguments": Case(BODY, lambda n: "[" * n, arguments),
    "depth of many calls": Case(1000, lambda n: DEEP * n, chat.parse_messages),
    "calls of a response's input": Case(
        VALUES // 5, lambda n: {"model": "m", "input": [CALL] * n}, translate
    ),
    # Templates.
    "fields of a template": Case(
        BODY // 4, lambda n: "x" * n, lambda prompt: render("{prompt}" * 4, prompt)
    ),
    "fields without an end": Case(BODY // 8, lambda n: "{prompt}" * n, render),
    "doubled braces": Case(BODY // 2, lambda n: "{{" * n, render),
    "one unknown field of a template": Case(BODY, lambda n: "{" + "a" * n + "}", render),
    "a system prompt that is looked for": Case(
        BODY, lambda n: ("a" * (n // 2) + "b", "a" * n), lambda texts: texts[0] in texts[1]
    ),
    # Tools and guides.
    "tools": Case(MAX_TOOLS, lambda n: {"tools": tools(n)}, fields),
    "tools without an end": Case(VALUES // 4, lambda n: {"tools": tools(n)}, fields),
    "names of tools that are near": Case(
        MAX_TOOLS, lambda n: {"tools": NEAR[:n], "tool_choice": NAMED}, fields
    ),
    "a guide of all calls": Case(
        MAX_TOOLS // 4, tool_functions, lambda them: calls_guide(them, "arguments", parallel=True)
    ),
    "a guide of large parameters": Case(VALUES, large_function, arguments_guide),
    "parsers of a request's sequences": Case(
        MAX_TOOLS, hermes, lambda parser: [copy.deepcopy(parser) for _ in range(64)]
    ),
    "properties of a schema": Case(1500, properties, checked),
    "a schema behind a long name": Case(60_000, long_name, checked),
    "references of a schema": Case(20, chain, checked),
    "references without an end": Case(1000, chain, checked),
    "numbers of an enum": Case(60_000, lambda n: schema(enum=[10**30] * (n // 33)), checked),
    "characters of an expression": Case(1 << 14, lambda n: "a" * n, regex),
    "escapes of an expression": Case(1 << 15, lambda n: "\\." * (n // 2), regex),
    "a class of an expression": Case(1 << 15, lambda n: "[" + "\\." * (n // 2 - 1) + "]", regex),
    "alternatives of an expression": Case(1 << 14, lambda n: "a|" * (n // 2) + "a", regex),
    "groups of an expression": Case(1 << 14, lambda n: "(((a)))" * (n // 7), regex),
    "nested repetitions": Case(16, lambda n: "(" * n + "." + "{1,512})" * n, regex),
    "choices": Case(1 << 14, few_choices, lambda them: choice_guide(them, "w")),
    "a grammar": Case(1 << 14, lambda n: Guide("grammar", "(" * n), checked),
    # Stop strings.
    "stop strings": Case(
        1024, lambda n: [f"{number:02}" + "ab" * (n // 2 - 1) for number in range(64)], compiled
    ),
    "text before a stop string": Case(1 << 13, lambda n: "a" * n, stopped),
    "stop strings with commas": Case(BODY, lambda n: "a," * (n // 2), split_words),
    # Images.
    "a data URL": Case(BODY, lambda n: "image/png;base64," + "A" * n, data_url),
    "escapes of a data URL": Case(1 << 16, lambda n: "image/png;base64," + "%41" * n, data_url),
    "slashes of a data URL": Case(BODY, lambda n: "image/png;base64," + "%2f" * (n // 3), data_url),
    "parameters of a data URL": Case(BODY, lambda n: ";a=" * (n // 3), data_url),
    "fill bytes of a JPEG": Case(BODY, lambda n: JPEG + b"\xff" * n, broken_image),
    "segments of a JPEG": Case(BODY, lambda n: JPEG[:2] + b"\xff\xe0\0\2" * (n // 4), broken_image),
    # What the model makes, and what the engine sends.
    "an event in parts": Case(BODY, lambda n: b"data: " + b"x" * n + b"\n\n", in_parts),
    "line ends in parts": Case(1 << 20, lambda n: b"\r\n" * (n // 2), in_parts),
    "bytes of a character": Case(1 << 14, lambda n: [BYTE_TOKEN] * n, detokenized),
    "deltas that merge": Case(1 << 16, lambda n: [Content("x" * 32)] * n, merge),
    "white space before reasoning": Case(1 << 16, int, spaces),
    "reasoning": Case(1 << 16, int, reasoned),
    # Errors.
    "the code in a text": Case(1 << 19, lambda n: "E1000 aaaa" * (n // 10), errors.from_text),
}
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
    "python starts": ("", "<|python_start|>["),
    "empty calls": ("", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "calls of Llama": ("", '{"name": "f", "parameters": {}};'),
    "calls of Mistral": ("[TOOL_CALLS][", '{"name": "f", "arguments": {}},'),
    "a long argument": ('<tool_call>{"name": "f", "arguments": {"a": "', "x"),
    "an early argument": ('<tool_call>{"arguments": {"a": "', "x"),
    "an argument in a string": ('<tool_call>{"name": "f", "arguments": "', '\\"'),
    "a long key": ('<tool_call>{"', "x"),
    "a long number": ('<tool_call>{"name": "f", "arguments": {"a": ', "9"),
    "a long list of calls": ("[", 'f(a="x"),'),
    "a long text of a call": ('[f(a="', "\\'"),
    "a head of Mistral": ("[TOOL_CALLS]", "f"),
    "escapes": ('{"a": "', "\\u0041"),
}


def parsed_in(answer: str, parser: str, *, at_once: bool) -> Case:
    opening, repeated = ANSWERS[answer]

    def pieces(length: int) -> list[str]:
        count = length // len(repeated)
        return [opening, *([repeated * count] if at_once else [repeated] * count)]

    return Case(1 << 13, pieces, lambda made: fed(PARSERS[parser](), iter(made)))


def assert_linear(case: Case) -> None:
    """CPU at the limit is at most 2.5 times that at half of it; three tries, on a busy machine."""
    whole_input, half_input = case.make(case.limit), case.make(case.limit // 2)
    for _ in range(3):
        whole = cpu(lambda: case.work(whole_input))
        half = cpu(lambda: case.work(half_input))
        if whole <= 2.5 * half + 0.01:  # pages and caches cost some ms at once
            return
    pytest.fail(f"{half * 1000:.1f} ms at half of {case.limit}, then {whole * 1000:.1f} ms")


@pytest.fixture(autouse=True)
def quiet() -> None:
    """No notes about names: they are bounded, and slow."""
    log_notes._noted.update(f"full {number}" for number in range(200))


@pytest.mark.parametrize("name", list(CASES))
def test_cpu_is_linear_up_to_the_bound(name: str) -> None:
    assert_linear(CASES[name])


@pytest.mark.parametrize("answer", list(ANSWERS))
@pytest.mark.parametrize("parser", list(PARSERS))
@pytest.mark.parametrize("at_once", [False, True], ids=["in tokens", "at once"])
def test_parsers_of_answers_are_linear(parser: str, answer: str, at_once: bool) -> None:
    assert_linear(parsed_in(answer, parser, at_once=at_once))


# The regular expressions on clients' texts and engines', and how they are used.
PATTERNS = {
    "errors._CODED": ("search",),
    "images.image_header._FILL": ("match",),
    "images.image_limits._DATA_URL": ("match",),
    "serving.adapter_store._NAME": ("fullmatch",),
    "serving.openai.parsers.json_value._ESCAPE": ("match",),
    "serving.openai.parsers.json_value._LITERAL": ("fullmatch",),
    "serving.openai.parsers.json_value._OPEN_ESCAPE": ("fullmatch",),
    "serving.openai.parsers.json_value._RUN": ("match",),
    "serving.openai.parsers.json_value._WORD": ("match",),
    "serving.openai.parsers.mistral._HEAD": ("fullmatch",),
    "serving.openai.parsers.python_literals._ESCAPE": ("search", "match"),
    "serving.openai.parsers.python_literals._KEYWORD": ("match",),
    "serving.openai.parsers.python_literals._NAME": ("match",),
    "serving.openai.parsers.python_literals._NUMBER": ("match",),
    "serving.openai.parsers.python_literals._SPACE": ("match",),
    "serving.openai.parsers.python_literals._STRING": ("match",),
    "serving.openai.parsers.pythonic._OPEN_START": ("fullmatch",),
    "serving.openai.parsers.pythonic._START": ("match",),
    "system.public_addresses.HTTP_URL": ("fullmatch",),
    "text.detokenize._BYTE_TOKEN": ("fullmatch",),
    "text.guide._SPECIAL": ("search",),
    "text.json_schema.NAME": ("fullmatch",),
    "text.regex_check._HEXADECIMAL": ("match",),
    "text.regex_check._REPEAT": ("match",),
    "text.sse._NAME": ("search",),
}
LENGTH = 1 << 12


def patterns() -> dict[str, re.Pattern[Any]]:
    """Patterns of the modules that read such texts, by the name of the module that has each."""
    found: dict[str, re.Pattern[Any]] = {}
    modules: list[ModuleType] = [errors, public_addresses]
    for package in (cog_triton.text, cog_triton.serving, cog_triton.images):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            modules.append(importlib.import_module(module.name))
    for place in modules:
        for name, value in vars(place).items():
            if isinstance(value, re.Pattern) and value not in found.values():
                found[f"{place.__name__.removeprefix('cog_triton.')}.{name}"] = value
    return found


def attacks(pattern: str) -> Iterator[str]:
    """Texts of one or two repeated parts, of what the pattern is made of, without an end."""
    words = re.findall(r"[A-Za-z]{3,}|\[[A-Z_]+\\\]", pattern)
    parts = {*"a0 \\\"'\n.,;=-[(:/@%<E\xff", *(word.replace("\\", "") for word in words)}
    for one, two in itertools.product(sorted(parts), repeat=2):
        for opening in ("", "data:", "http://", "[", '"', "E1000 a", "{1"):
            yield opening + (one + two) * (LENGTH // len(one + two)) + "\0"


def test_every_pattern_is_listed() -> None:
    assert sorted(patterns()) == sorted(PATTERNS)


@pytest.mark.parametrize("name", list(PATTERNS))
def test_no_pattern_backtracks(name: str) -> None:
    """A quadratic one takes 50 ms for such a text; a linear one, a fraction of a millisecond."""
    pattern = patterns()[name]
    for text in attacks(str(pattern.pattern)):
        value: Any = text.encode("latin-1") if isinstance(pattern.pattern, bytes) else text
        for use in PATTERNS[name]:
            started = time.thread_time()
            if use == "search":
                pattern.sub(value[:0], value)
            else:
                getattr(pattern, use)(value)
            assert time.thread_time() - started < 0.02, (use, text[:80])


# Beyond the bounds: the error, and its rule.
BEYOND: dict[str, tuple[str, str, Work]] = {
    "fields of a template": (
        "E1003",
        "more than 16 fields",
        lambda: render("{prompt}" * 17, "x"),
    ),
    "pieces of a template": (
        "E1003",
        "16384 pieces",
        lambda: render("{prompt}" + "{{" * 20_000, "x"),
    ),
    "text of a template": (
        "E1002",
        "makes 32000000 characters of text; 9049088 at most",
        lambda: render("{prompt}" * 16, "x" * 2_000_000),
    ),
    "tools": ("E1005", "at most 1024 items", lambda: parse_chat(tools=tools(1025))),
    "a number": (
        "E1006",
        "a number has 33 characters; 32 at most",
        lambda: chat.parse_messages(call(f'{{"a":{"9" * 33}}}')),
    ),
    "a number beyond doubles": (
        "E1006",
        "1e400 is beyond the range",
        lambda: chat.parse_messages(call('{"a":1e400}')),
    ),
    "depth of arguments": (
        "E1006",
        "nested deeper than 64 levels",
        lambda: chat.parse_messages(call('{"a":' + "[" * 64 + "]" * 64 + "}")),
    ),
    "depth that Python refuses": (
        "E1006",
        "nested deeper than 64 levels",
        lambda: chat.parse_messages(call('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")),
    ),
    "values of arguments": (
        "E1005",
        "values; 262144 at most",
        lambda: chat.parse_messages(call('{"a":[' + "0," * 262_144 + "0]}")),
    ),
    "a schema's number": (
        "E1005",
        "a number has 4000 characters",
        lambda: Guide("json_schema", '{"const":' + "9" * 4000 + "}").check("w"),
    ),
    "stop strings with commas": (
        "E1005",
        "has 70000 characters; 65600 at most",
        lambda: WordLimits(64, 1024).parse("stop_sequences", "," * 70_000),
    ),
    "log probabilities": (
        "E1005",
        f"{MAX_LOG_PROBS} at most",
        lambda: check_log_probs([planned((1 << 16) + 1, 1)], 64, 0),
    ),
}


def planned(max_tokens: int, prompt: int, *, of_prompt: bool = False) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerationRequest(
        input_ids=[1] * prompt, sampling=sampling, stops=(), prompt_log_probs=of_prompt
    )


@pytest.mark.parametrize("name", list(BEYOND))
def test_beyond_a_bound_there_is_a_code(name: str) -> None:
    code, rule, work = BEYOND[name]
    with pytest.raises(CogTritonError, match=re.escape(rule)) as caught:
        work()
    assert caught.value.code == code


def test_up_to_a_bound_all_is_taken() -> None:
    render("{prompt}" * 16, "x" * 1000)
    parse_chat(tools=tools(1024))
    chat.parse_messages(call('{"a":[' + "0," * 262_000 + "0]}"))
    chat.parse_messages(call('{"a":' + "[" * 63 + "]" * 63 + "}"))
    check_log_probs([planned(1 << 17, 1000)], 1, 20)
    check_log_probs([planned(1, 4096, of_prompt=True)] * 64, 1, 1)
    with pytest.raises(InvalidArgument, match="logprobs"):
        check_log_probs([planned(1, 1 << 17, of_prompt=True)], 64, 0)


def test_only_some_unknown_names_are_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_notes, "_noted", set())
    compared = []
    monkeypatch.setattr(log_notes, "nearest", lambda name, _: compared.append(name) or "")
    unknown = UnknownNames(logging.getLogger("x"), "field", ["known"])
    assert {unknown.hint(f"n{number}") for number in range(1000)} == {""}
    assert len(compared) == MAX_UNKNOWN
    assert len(caplog.messages) == MAX_UNKNOWN + 1
    assert caplog.messages[-1] == "field: more than 20 names are unknown, and ignored"


def test_long_words_are_near_nothing() -> None:
    assert nearest("mesages", ["messages"]) == "; did you mean 'messages'?"
    assert nearest("m" * 97, ["m" * 96]) == ""
    assert nearest("m" * 95, ["m" * 97]) == ""


def test_shortened_values_have_long_keys_cut() -> None:
    assert len(shortened({"\x7f" * 10**6: 1})) == 80
    assert shortened(["a", 1]) == "['a', 1]"


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", "[1,]", '"\x01"', "1e999", "٣", ""])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        client_json.parse(text)


def test_json_of_a_client_has_its_values() -> None:
    value = {"a": [1, -2.5e3, True, None, "1e999 ,[{" * 40], "b": {}}
    assert client_json.parse(json.dumps(value)) == value
    assert client_json.parse(json.dumps(",[{" * 100)) == ",[{" * 100


@pytest.mark.parametrize("escaped", [r"\ud800", r"\uDFFF", r"\ud800a"])
def test_lone_surrogates_of_arguments_are_refused(escaped: str) -> None:
    with pytest.raises(BadMessages, match="not Unicode"):
        chat.parse_messages(call(f'{{"a":"{escaped}"}}'))


def test_sequences_share_the_tables_of_their_stop_strings() -> None:
    stop_strings._fallback.cache_clear()
    for _ in range(64):
        StopMatcher([f"{'a' * 1000}{number}" for number in range(64)])
    assert stop_strings._fallback.cache_info().misses == 64


def test_a_data_url_has_few_escapes() -> None:
    with pytest.raises(InvalidArgument, match="more than 65536 escapes"):
        data_url("image/png;base64," + "%41" * 65_537)
    assert data_url("image/png;base64,%2b%2B%2f%3D") == base64.b64decode(b"++/=")


def test_base64_is_decoded_within_the_limit() -> None:
    data = base64.b64encode(bytes(100)).decode()
    with pytest.raises(InvalidArgument, match="MAX_IMAGE_BYTES"):
        read_data_url("w", f"data:image/png;base64,{data}", ImageLimits(size=50))
