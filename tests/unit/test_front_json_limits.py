"""Depth and number of values of JSON bodies, on each port."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_front import decided, gates

from cog_triton.errors import InvalidArgument
from cog_triton.front.json_body import JSONLimits, Numbers, require_bounded
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.message import Answer
from cog_triton.text.chat import parse_messages

PATHS = {
    "cog": "/predictions",
    "openai": "/v1/chat/completions",
    "triton": "/v2/models/tensorrt_llm/generate",
}


def refusal(port: str, body: bytes) -> str:
    """What the gate refuses a body with; empty if it passes."""
    bodies = LargeBodies()
    found = decided(gates(bodies=bodies)[port], "POST", PATHS[port], body)
    bodies.close()
    if not isinstance(found, Answer):
        return ""
    error = json.loads(found.body)["error"]
    return f"{found.status} {error['message'] if port == 'openai' else error}"


def test_depth_counts_brackets_outside_of_strings() -> None:
    limits = JSONLimits(depth=64)
    require_bounded(b"[" * 64 + b"]" * 64, limits)
    require_bounded(b'["' + b"[" * 100 + rb"\"[[" + b'"]', limits)
    require_bounded(b"[" + b"[]," * 1000 + b"{}]", JSONLimits(depth=2))
    for body in (b"[" * 65 + b"]" * 65, b"[[[]]]", b'[[{"a":[]}]]'):
        with pytest.raises(InvalidArgument, match="nested deeper than"):
            require_bounded(body, limits if len(body) > 100 else JSONLimits(depth=2))


@pytest.mark.parametrize(
    "item", [b"0", b"[]", b"{}", b'""', b"null", b"1.5", b'{"a":0}', b'"a,[\\"{"', b" 0\n", b"[0]"]
)
@pytest.mark.parametrize("numbers", Numbers)
def test_values_are_counted_outside_of_strings(item: bytes, numbers: Numbers) -> None:
    body = b'{"a":[' + b",".join([item] * 1000) + b"]}"
    require_bounded(body, JSONLimits(values=4000, numbers=numbers))
    cheap = item.strip().isdigit() or (numbers is Numbers.FREE and item == b"1.5")
    limits = JSONLimits(values=100 if cheap else 900, numbers=numbers)
    if cheap and numbers is Numbers.FREE:
        require_bounded(body, limits)
        return
    with pytest.raises(InvalidArgument, match="MAX_JSON_VALUES"):
        require_bounded(body, limits)


def test_eight_token_ids_count_as_one() -> None:
    ids = json.dumps({"prompt": list(range(1000))}).encode()
    require_bounded(ids, JSONLimits(values=130, numbers=Numbers.IDS))
    with pytest.raises(InvalidArgument, match=r"has \d+ values; 120 at most"):
        require_bounded(ids, JSONLimits(values=120, numbers=Numbers.IDS))
    with pytest.raises(InvalidArgument, match="MAX_JSON_VALUES"):
        require_bounded(ids, JSONLimits(values=130))


def test_what_another_parser_would_read_otherwise_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="UTF-8"):
        require_bounded('{"a":[0]}'.encode("utf-16"), JSONLimits())
    slow = b"[" + b",".join([b"9" * 4000] * 100) + b"]"
    with pytest.raises(InvalidArgument, match="32 characters"):
        require_bounded(slow, JSONLimits())
    require_bounded(b'["' + b"9" * 100_000 + b'"]', JSONLimits())


@pytest.mark.parametrize("port", ["cog", "openai"])
def test_a_long_chat_passes(port: str) -> None:
    text = 'Commas, [brackets], {braces} and "quotes", a hundred times. ' * 8
    for content in (text, [{"type": "text", "text": text}]):
        messages = [{"role": "user", "content": content}] * 4096
        parse_messages(messages, 4096)
        body: Any = {"input": {"messages": messages}} if port == "cog" else {"messages": messages}
        assert refusal(port, json.dumps(body).encode()) == ""


def test_long_prompts_of_token_ids_pass() -> None:
    ids = list(range(1 << 17))
    table = [[0.1234567890123456] * 4096] * 90
    assert refusal("openai", json.dumps({"prompt": ids}).encode()) == ""
    assert refusal("triton", json.dumps({"input_ids": ids, "input_lengths": 9}).encode()) == ""
    assert refusal("triton", json.dumps({"prompt_embedding_table": table}).encode()) == ""


@pytest.mark.parametrize(
    ("item", "more", "code"),
    [("0", "", "400 E1006"), ('"a"', "", "400 E1006"), ("0", ',"n":' + "9" * 5000, "400 E1005")],
)
def test_messages_that_are_no_objects_do_not_reach_coglet(item: str, more: str, code: str) -> None:
    """It answers with a text for each, and takes 2.6 KB for that: 8 MiB of them ended a server."""
    key = '"\\u006dessages"'
    body = f'{{"input":{{{key}:[{",".join([item] * 1000)}]{more}}}}}'.encode()
    assert refusal("cog", body).startswith(code)
    few = f'{{"input":{{{key}:[{item},{{}}]}}}}'.encode()
    assert refusal("cog", few) == ""


def test_other_inputs_of_many_values_pass() -> None:
    for value in ([0] * 1000, {"messages": "a," * 1000}, {"prompt": "a," * 1000}):
        assert refusal("cog", json.dumps({"input": value}).encode()) == ""
