"""OpenAI API request bodies: accepted and refused fields, and their table in docs/openai.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_fields import KNOWN_FIELDS
from openai import types
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from cog_triton.engines.base import Abilities
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.errors import InvalidArgument, UserError
from cog_triton.serving.openai import requests
from cog_triton.serving.openai.requests import ChatRequest, CompletionRequest, parse
from cog_triton.text.sampling import MAX_TOKENS

F = {"name": "f"}
TOOL = {"type": "function", "function": F}
LISTING = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def test_defaults_are_openais() -> None:
    request = parse(ChatRequest, CHAT)
    sampling = request.sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_tokens == MAX_TOKENS
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.0, 0.0)
    assert sampling.repetition_penalty == 1.0
    assert not sampling.greedy
    assert request.stops() is None
    assert not request.log_probs
    assert len({parse(ChatRequest, CHAT).sampling().seed for _ in range(8)}) > 1


def test_given_fields_are_used() -> None:
    given = {"min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 0}
    given |= {"presence_penalty": -1, "frequency_penalty": 1.5, "repetition_penalty": 1.1}
    others = {"max_completion_tokens": 7, "stop": ["a", "b"], "logprobs": True, "top_logprobs": 0}
    request = parse(ChatRequest, {**CHAT, **given, **others})
    sampling = request.sampling()
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.max_tokens == 7
    assert sampling.greedy
    assert request.stops() == ["a", "b"]
    assert request.log_probs
    assert parse(ChatRequest, {**CHAT, "stop": "x"}).stops() == ["x"]
    assert parse(ChatRequest, {**CHAT, "stop": []}).stops() == []
    assert parse(ChatRequest, {**CHAT, "top_k": -1}).sampling().top_k == 0
    assert parse(ChatRequest, {**CHAT, "max_tokens": 5, "max_completion_tokens": 6}).limit == 6
    assert parse(ChatRequest, {**CHAT, "seed": -2}).sampling().seed == 2**64 - 2
    assert len({parse(ChatRequest, {**CHAT, "seed": -1}).sampling().seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"n": 1.0, "max_tokens": 4.0, "seed": 4.0, "top_k": 4.0, "top_logprobs": 0.0},
        {"logprobs": False, "top_logprobs": 0},
        {"logit_bias": {}},
        {"tools": []},
        {"tools": None, "tool_choice": "none", "parallel_tool_calls": False},
        {"user": "someone", "safety_identifier": "x", "prompt_cache_key": "y"},
        {"store": True, "metadata": {"a": "b"}, "verbosity": "low", "prediction": {"type": "x"}},
        {"stream_options": {"include_usage": True}},
        # Names that resemble those of fields: of other clients and servers, or misspelt.
        {"my_proxy_tag": 1, "a b": 2, "temprature": 1, "top k": 1, "usage": {}, "models": []},
        {"client_metadata": {}, "litellm_metadata": {}, "truncation": "auto", "user_id": "u"},
        {"think": True, "separate_reasoning": True, "draft_model": "m", "intent": "chat"},
        {"return_token_ids": False, "return_tokens_as_token_ids": False, "request_id": "r"},
        {"add_special_tokens": False, "prompt_cache_options": {"ttl": "30m"}, "prompt": ""},
        {"modalities": ["text"]},
        {"service_tier": "priority", "prompt_cache_retention": "24h"},
        {"response_format": {"type": "text"}},
        {"length_penalty": 1.0, "use_beam_search": False, "min_p": 0},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {"stream": True, "stream_options": {"continuous_usage_stats": False}},
        dict.fromkeys(requests.known_fields(ChatRequest) - CHAT.keys()),
        dict.fromkeys(["prompt_token_ids", "moderation", "no_such_field"]),
    ],
)
def test_unsupported_fields_with_neutral_values_are_accepted(neutral: dict[str, Any]) -> None:
    parse(ChatRequest, {**CHAT, **neutral})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("chat", completion_create_params.CompletionCreateParamsBase),
        ("completions", types.completion_create_params.CompletionCreateParamsBase),
        ("embeddings", types.EmbeddingCreateParams),
        ("responses", response_create_params.ResponseCreateParamsBase),
    ],
)
def test_fields_of_the_locked_client_are_known(name: str, parameters: type) -> None:
    """The newest client, and Anthropic's, are compared in tests/clients."""
    assert parameters.__annotations__.keys() - KNOWN_FIELDS[name] == set()


def test_unknown_fields_are_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        parse(ChatRequest, {**CHAT, "x_gateway_route": 1})
    assert caplog.text.count("request field 'x_gateway_route' is unknown, and ignored") == 1


def test_no_more_of_a_value_is_written_than_an_error_shows() -> None:
    class Item(int):
        written = 0

        def __repr__(self) -> str:
            Item.written += 1
            return "1"

    with pytest.raises(InvalidArgument, match=r"suffix=\{'a': \[1, 1, 1, .*\.\.\.: "):
        parse(CompletionRequest, {"prompt": "a", "suffix": {"a": [Item(1)] * 30_000}})
    assert Item.written < 100


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ["Hi"]),
        (["Hi"], ["Hi"]),
        (["Hi", "a"], ["Hi", "a"]),
        ([1], [[1]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], [[]]),
    ],
)
def test_prompts_may_be_texts_or_ids_in_a_list_or_not(prompt: Any, expected: Any) -> None:
    parsed = parse(CompletionRequest, {**TEXT, "prompt": prompt})
    assert parsed.prompts() == expected
    assert parsed.prompt_count == len(expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [*ChatRequest.model_fields, *CompletionRequest.model_fields, "n", "tools", "user", "store"]
)


@given(st.dictionaries(FIELDS | st.text(max_size=5), JSON, max_size=5))
def test_any_json_is_parsed_or_refused_with_a_code(extra: dict[str, Any]) -> None:
    for kind, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        try:
            request = parse(kind, {**body, **extra})
            request.sampling()
            request.stops()
        except UserError:
            continue


PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text("utf-8")
SECTION = PAGE.partition("## Fields\n")[2].partition("\n## ")[0]
ROWS = [line.split(" | ") for line in SECTION.splitlines() if line.startswith("| `")]
COLUMNS = {"openvino": 1, "mock": 4}


def test_every_field_is_in_the_section() -> None:
    known = requests.known_fields(ChatRequest) | requests.known_fields(CompletionRequest)
    assert known - set(re.findall(r"`(\w+)`", SECTION)) == set()


@pytest.mark.parametrize(
    ("family", "field", "able"),
    [
        ("openvino", "min_p", lambda found: "min_p" in found.sampling),
        ("openvino", "logit_bias", lambda found: "logit_bias" in found.sampling),
        ("openvino", "top_logprobs", lambda found: found.top_log_probs > 0),
        ("openvino", "guided_regex", lambda found: "regex" in found.guides),
        ("openvino", "guided_grammar", lambda found: "grammar" in found.guides),
        ("mock", "top_logprobs", lambda found: found.top_log_probs > 0),
        ("mock", "guided_regex", lambda found: "regex" in found.guides),
    ],
)
def test_what_is_refused_is_what_the_engine_cannot(family: str, field: str, able: object) -> None:
    abilities: dict[str, Abilities] = {
        "openvino": OpenVINOFamily.abilities.fget(object()),  # type: ignore[attr-defined]
        "mock": MockFamily.abilities,
    }
    row = next(row for row in ROWS if f"`{field}`" in row[0])
    assert callable(able)
    assert (row[COLUMNS[family]] != "refused") == bool(able(abilities[family]))
