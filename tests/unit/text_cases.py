"""Worst inputs known for each bound of text, and the CPU that they take."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
from small_tokenizers import byte_fallback, byte_level

from cog_triton import errors
from cog_triton.engines.openvino import guides
from cog_triton.errors import CogTritonError
from cog_triton.pictures.image_limits import ImageLimits, read_data_url, read_header
from cog_triton.serving.openai import requests
from cog_triton.serving.openai.embeddings import EmbeddingsRequest
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser, ReasoningParser
from cog_triton.serving.openai.parsers.call_parser import CALL_PARSERS, Content, merge
from cog_triton.serving.openai.request_body import parse_body
from cog_triton.serving.openai.requests import (
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    Tool,
    functions,
)
from cog_triton.serving.openai.responses_request import read, translate
from cog_triton.text import chat, prompts, stop_strings
from cog_triton.text.detokenize import Detokenizer, Vocabulary
from cog_triton.text.guide import Guide, choice_guide
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


def cpu(work: Work, runs: int) -> float:
    """Seconds of CPU that `work` takes, whatever coded error it ends with; the best of `runs`."""
    found = []
    gc.collect()
    gc.disable()
    for _ in range(runs):
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
    detokenizer = Detokenizer.by(Vocabulary(BYTES))
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
    return guides.check(Guide("regex", text), "w")


def checked(guide: Guide) -> object:
    return (guide.check if guide.kind == "grammar" else partial(guides.check, guide))("w")


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
    "wide integers of arguments": Case(BODY // 66, lambda n: listed("9" * 64, n), arguments),
    "values of arguments": Case((1 << 17) - 2, lambda n: listed("[]", n), arguments),
    "one integer of arguments": Case(BODY, lambda n: "9" * n, arguments),
    "depth of arguments": Case(BODY, lambda n: "[" * n, arguments),
    "depth of many calls": Case(1000, lambda n: DEEP * n, chat.parse_messages),
    "calls of a response's input": Case(
        VALUES // 5, lambda n: read({"model": "m", "input": [CALL] * n}), translate
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


def assert_linear(case: Case) -> None:
    """CPU at the limit is at most 2.5 times that at half of it; more tries, on a busy machine."""
    whole_input, half_input = case.make(case.limit), case.make(case.limit // 2)
    whole = half = float("inf")
    for runs in (2, 5, 5, 5, 5, 5, 5):
        whole = min(whole, cpu(lambda: case.work(whole_input), runs))
        half = min(half, cpu(lambda: case.work(half_input), runs))
        if whole <= 2.5 * half + 0.01:  # pages and caches cost some ms at once
            return
    pytest.fail(f"{half * 1000:.1f} ms at half of {case.limit}, then {whole * 1000:.1f} ms")
