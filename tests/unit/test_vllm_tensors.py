"""Tensors of vllm_model: requests are parsed or refused by name, outputs are those requested."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cog_triton.backend.vllm_tensors import ParsedRequest, parse_request
from cog_triton.errors import InvalidArgument, PromptRequired


def inputs(**values: Any) -> dict[str, Any]:
    """Tensors as the stub sees them."""
    made = {}
    for name, value in {"text_input": "Hello", **values}.items():
        text = isinstance(value, str)
        made[name] = np.array(
            [value.encode() if text else value], dtype=np.object_ if text else np.bool_
        )
    return made


def parsed(parameters: dict[str, Any] | None = None, **values: Any) -> ParsedRequest:
    return parse_request("vllm_model", inputs(**values), parameters or {})


def refusal(parameters: dict[str, Any] | None = None, **values: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        parsed(parameters, **values)
    return caught.value.detail


def test_sampling_parameters_of_both_places_are_merged() -> None:
    request = parsed({"top_k": 5}, sampling_parameters='{"max_tokens": 3}').request
    assert request.sampling == {"top_k": 5, "max_tokens": 3}


@pytest.mark.parametrize(
    ("values", "stream", "prefix"),
    [
        ({}, False, "Hello"),
        ({"exclude_input_in_output": False}, False, "Hello"),
        ({"exclude_input_in_output": True}, False, ""),
        ({"stream": True}, True, ""),
        ({"stream": True, "exclude_input_in_output": True}, True, ""),
    ],
)
def test_the_prompt_is_echoed_unless_excluded(
    values: dict[str, Any], stream: bool, prefix: str
) -> None:
    request = parsed(**values)
    assert (request.request.stream, request.prefix) == (stream, prefix)


def test_values_of_every_type_are_parsed() -> None:
    sent = {
        "n": 2,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "seed": None,
        "logit_bias": {"7": -1},
        "structured_outputs": {"regex": "a+"},
        "lora_name": "sheep",
        "bad_words": ["x"],
    }
    made = parsed(sampling_parameters=json.dumps(sent)).request.sampling
    assert made == {**sent, "logit_bias": {7: -1.0}}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temprature": 0.5}, "vLLM 0.33.0 has no such parameter; did you mean 'temperature'"),
        ({"best_of": 2}, "best_of: vLLM 0.33.0 has no such parameter"),
        ({"output_kind": 1}, "output_kind: vLLM 0.33.0 has no such parameter"),
        ({"_eos_token_id": 1}, "_eos_token_id: vLLM"),
        ({"temperature": "warm"}, "temperature='warm': must be a number"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: must be a whole number or null"),
        ({"lora_name": 3}, "lora_name=3: must be text"),
        ({"structured_outputs": {"jsn": "{}"}}, "structured_outputs.jsn: no such constraint; did"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex=3: must be text or null"),
        ({"logit_bias": {"a": 1}}, "logit_bias={'a': 1}: must give a number"),
    ],
)
def test_unknown_or_invalid_sampling_parameters_are_refused(
    parameters: dict[str, Any], words: str
) -> None:
    detail = refusal(sampling_parameters=json.dumps(parameters))
    assert words in detail
    assert "only vLLM" not in detail


@pytest.mark.parametrize(
    ("parameters", "values", "words"),
    [
        ({"strem": 1}, {}, "strem: unknown input or sampling parameter; did you mean 'stream'"),
        (
            {"max_token": 1},
            {},
            "max_token: unknown input or sampling parameter; did you mean 'max",
        ),
        ({"return_logprob": 1}, {}, "did you mean 'return_logprobs'"),
        (
            {"max_tokens": 4},
            {"sampling_parameters": '{"max_tokens": 3}'},
            "max_tokens: 3 in sampling_parameters, 4 as a parameter",
        ),
        *(({}, {"sampling_parameters": bad}, "sampling_parameters: ") for bad in ("{", "[1]", "3")),
        ({}, {"image": "aGk="}, "image: vllm_model takes text only"),
        ({}, {"embedding_request": "{}"}, "Model vllm_model does not support 'embed' request"),
        (
            {},
            {"stream": True, "exclude_input_in_output": False},
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_name(
    parameters: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    assert words in refusal(parameters, **values)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptRequired):
        parsed(text_input="")


def test_text_must_be_one_utf8_string() -> None:
    bad = {**inputs(), "text_input": np.array([b"\xff"], dtype=np.object_)}
    with pytest.raises(InvalidArgument, match="text_input: not UTF-8"):
        parse_request("vllm_model", bad, {})
    two = {**inputs(), "text_input": np.array([b"a", b"b"], dtype=np.object_)}
    with pytest.raises(InvalidArgument, match="text_input: 2 values"):
        parse_request("vllm_model", two, {})
