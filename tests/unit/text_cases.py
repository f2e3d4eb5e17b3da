"""Worst inputs known for each bound of text, and the CPU that they take."""

from __future__ import annotations

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
from cog_triton.serving.openai.parsers.answer_parser import ReasoningParser
from cog_triton.serving.openai.parsers.call_parser import Content, merge
from cog_triton.serving.openai.request_body import parse_body
from cog_triton.serving.openai.requests import (
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    Tool,
    functions,
)
from cog_triton.text import chat, prompts, stop_strings
from cog_triton.text.detokenize import Detokenizer, Vocabulary
from cog_triton.text.guide import Guide, choice_guide
from cog_triton.text.sse import EventSplitter
from cog_triton.text.stop_strings import StopMatcher
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.text.tool_schema import ToolFunction, calls_guide

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


def chain(count: int) -> Guide:
    """Definitions that each refer to the two that follow."""
    definitions: dict[str, Any] = {f"d{number}": {"type": "null"} for number in range(count + 3)}
    for number in range(count):
        following = [{"$ref": f"#/$defs/d{number + step}"} for step in (1, 2)]
        definitions[f"d{number}"] = {"anyOf": following}
    return schema(**{"$defs": definitions})


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


def listed(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def few_choices(count: int) -> list[str]:
    return ["(" * (count // 256)] * 256


NEAR = [{"type": "function", "function": {"name": "z" * 60 + f"{i:04}"}} for i in range(MAX_TOOLS)]
PART = {"type": "text", "text": "x" * (BODY // 4096)}

CASES = {
    # What a body has, by name.
    "unknown fields": Case(VALUES // 2, names, fields),
    "unknown keys of all messages": Case(
        4096,
        lambda n: [{**USER[0], f"k{number}": 0} for number in range(n)],
        chat.parse_messages,
    ),
    "one long unknown field": Case(BODY, lambda n: {"m" * n: 0}, fields),
    "a value that is shown": Case(BODY, lambda n: {"temperature": "\x7f" * n}, fields),
    "bias of token ids": Case(
        1024,
        lambda n: {str(number): 1.0 for number in range(n)},
        lambda bias: requests.parse(ChatRequest, chat_body(logit_bias=bias)).sampling(),
    ),
    "token ids": Case(VALUES * 8, lambda n: [7] * n, completion),
    "nested empty lists of a body": Case(VALUES, lambda n: listed("[]", n).encode(), parse_raw),
    # Messages.
    "parts of a message": Case(4096, lambda n: [PART] * n, said),
    "values of arguments": Case((1 << 17) - 2, lambda n: listed("[]", n), arguments),
    "one integer of arguments": Case(BODY, lambda n: "9" * n, arguments),
    "depth of arguments": Case(BODY, lambda n: "[" * n, arguments),
    # Templates.
    "fields of a template": Case(
        BODY // 4, lambda n: "x" * n, lambda prompt: render("{prompt}" * 4, prompt)
    ),
    "one unknown field of a template": Case(BODY, lambda n: "{" + "a" * n + "}", render),
    # Tools and guides.
    "tools": Case(MAX_TOOLS, lambda n: {"tools": tools(n)}, fields),
    "names of tools that are near": Case(
        MAX_TOOLS, lambda n: {"tools": NEAR[:n], "tool_choice": NAMED}, fields
    ),
    "a guide of all calls": Case(
        MAX_TOOLS // 4, tool_functions, lambda them: calls_guide(them, "arguments", parallel=True)
    ),
    "references without an end": Case(1000, chain, checked),
    "characters of an expression": Case(1 << 14, lambda n: "a" * n, regex),
    "groups of an expression": Case(1 << 14, lambda n: "(((a)))" * (n // 7), regex),
    "nested repetitions": Case(16, lambda n: "(" * n + "." + "{1,512})" * n, regex),
    "choices": Case(1 << 14, few_choices, lambda them: choice_guide(them, "w")),
    "a grammar": Case(1 << 14, lambda n: Guide("grammar", "(" * n), checked),
    # Stop strings.
    "stop strings": Case(
        1024, lambda n: [f"{number:02}" + "ab" * (n // 2 - 1) for number in range(64)], compiled
    ),
    "text before a stop string": Case(1 << 13, lambda n: "a" * n, stopped),
    # Images.
    "a data URL": Case(BODY, lambda n: "image/png;base64," + "A" * n, data_url),
    "escapes of a data URL": Case(1 << 16, lambda n: "image/png;base64," + "%41" * n, data_url),
    "fill bytes of a JPEG": Case(BODY, lambda n: JPEG + b"\xff" * n, broken_image),
    "segments of a JPEG": Case(BODY, lambda n: JPEG[:2] + b"\xff\xe0\0\2" * (n // 4), broken_image),
    # What the model makes, and what the engine sends.
    "an event in parts": Case(BODY, lambda n: b"data: " + b"x" * n + b"\n\n", in_parts),
    "bytes of a character": Case(1 << 14, lambda n: [BYTE_TOKEN] * n, detokenized),
    "deltas that merge": Case(1 << 16, lambda n: [Content("x" * 32)] * n, merge),
    "white space before reasoning": Case(1 << 16, int, spaces),
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
