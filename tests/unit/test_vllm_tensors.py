"""Requests of vllm_model: parsed or refused by name, passed to vLLM, and their events joined."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cog_triton.backend.vllm_tensors import ParsedRequest, parse_request
from cog_triton.engines.engine_client import coalesce_events
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.vllm.host_messages import TextEvent
from cog_triton.engines.vllm.sampling_arguments import from_engine_request
from cog_triton.errors import InvalidArgument, PromptRequired
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams


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


@pytest.mark.parametrize(
    ("values", "stream", "prefix"),
    [
        ({}, False, "Hello"),
        ({"exclude_input_in_output": True}, False, ""),
        ({"stream": True}, True, ""),
    ],
)
def test_the_prompt_is_echoed_unless_excluded(
    values: dict[str, Any], stream: bool, prefix: str
) -> None:
    request = parsed(**values)
    assert (request.request.stream, request.prefix) == (stream, prefix)


def test_values_of_every_type_and_of_both_places_are_parsed() -> None:
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
    made = parsed({"top_k": 5}, sampling_parameters=json.dumps(sent)).request.sampling
    assert made == {**sent, "logit_bias": {7: -1.0}, "top_k": 5}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"output_kind": 1}, "output_kind"),
        ({"_eos_token_id": 1}, "_eos_token_id"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"lora_name": 3}, "lora_name=3"),
        ({"structured_outputs": {"jsn": "{}"}}, "structured_outputs.jsn"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex=3"),
        ({"logit_bias": {"a": 1}}, "logit_bias={'a': 1}"),
    ],
)
def test_unknown_or_invalid_sampling_parameters_are_refused(
    parameters: dict[str, Any], words: str
) -> None:
    assert words in refusal(sampling_parameters=json.dumps(parameters))


@pytest.mark.parametrize(
    ("parameters", "values", "words"),
    [
        ({"strem": 1}, {}, "strem: unknown input or sampling parameter; did you mean 'stream'"),
        ({"max_token": 1}, {}, "did you mean 'max_tokens'"),
        ({"max_tokens": 4}, {"sampling_parameters": '{"max_tokens": 3}'}, "max_tokens: 3"),
        *(({}, {"sampling_parameters": bad}, "sampling_parameters: ") for bad in ("{", "[1]", "3")),
        ({}, {"image": "aGk="}, "image: "),
        ({}, {"embedding_request": "{}"}, "does not support 'embed' request"),
        ({}, {"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_name(
    parameters: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    assert words in refusal(parameters, **values)


def test_text_must_be_one_utf8_string() -> None:
    with pytest.raises(PromptRequired):
        parsed(text_input="")
    for texts, words in (([b"\xff"], "text_input: not UTF-8"), ([b"a", b"b"], "2 values")):
        bad = {**inputs(), "text_input": np.array(texts, dtype=np.object_)}
        with pytest.raises(InvalidArgument, match=words):
            parse_request("vllm_model", bad, {})


def embedding(request: Any) -> ParsedRequest:
    content = request if isinstance(request, str) else json.dumps(request)
    given = inputs(text_input="", embedding_request=content)
    return parse_request("vllm_model", given, {}, encode=lambda text: list(text.encode()))


@pytest.mark.parametrize(
    ("request_", "ids", "dimensions"),
    [
        ({"input": "abc"}, [97, 98, 99], None),
        ({"input": [1, 2], "model": "m"}, [1, 2], None),
        ({"input": "a", "pooling_params": {"dimensions": [2]}}, [97], 2),
        ({"input": "a", "pooling_params": {"dimensions": 2}}, [97], 2),
        ({"input": "a", "pooling_params": {}}, [97], None),
    ],
)
def test_an_embedding_request_is_that_of_vllm_backend(
    request_: Any, ids: list[int], dimensions: int | None
) -> None:
    sampling = SamplingParams(max_tokens=1)
    assert embedding(request_).request == EngineRequest(
        input_ids=ids, sampling=sampling, embeds=True, dimensions=dimensions
    )


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("{", "not JSON"),
        ([], "must be a JSON object"),
        ({"input": [["a"]]}, "input: "),
        ({"input": "a", "inputs": 1}, "did you mean 'input'"),
        ({"input": "a", "pooling_params": {"normalize": 1}}, "normalize: "),
        ({"input": "a", "pooling_params": {"dimensions": "2"}}, "dimensions=2"),
        ({"input": "a", "pooling_params": {"dimensions": [1, 2]}}, "dimensions=[1, 2]"),
    ],
)
def test_malformed_embedding_requests_are_refused(request_: Any, words: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        embedding(request_)
    assert words in raised.value.detail


def test_a_model_of_embeddings_makes_no_text() -> None:
    with pytest.raises(PromptRequired):
        embedding({"input": ""})
    with pytest.raises(InvalidArgument, match="does not support 'generate' request"):
        parse_request("vllm_model", inputs(), {}, encode=lambda text: [])
    given = inputs(text_input="", embedding_request='{"input": "a"}')
    with pytest.raises(InvalidArgument, match="dimensions: "):
        parse_request("vllm_model", given, {"dimensions": 2}, encode=lambda text: [])


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (Guide("json_schema", "{}"), {"json": "{}"}),
        (Guide("regex", "a+"), {"regex": "a+"}),
        (Guide("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Guide("structural_tag", "{}"), {"structural_tag": "{}"}),
        (Guide("native_tag", "{}"), {"structural_tag": "{}"}),
    ],
)
def test_guides_and_biases_are_sampling_params(guide: Guide, expected: dict[str, str]) -> None:
    sampling = SamplingParams(
        max_tokens=3, top_p=0.5, min_p=0.25, logit_bias={7: 2.0}, allowed_token_ids=(7, 8)
    )
    values = from_engine_request(EngineRequest(input_ids=[1], sampling=sampling, guide=guide))
    assert values["structured_outputs"] == expected
    assert (values["min_p"], values["logit_bias"]) == (0.25, {7: 2.0})
    assert values["allowed_token_ids"] == [7, 8]
    plain = from_engine_request(EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=3)))
    assert not {"structured_outputs", "logit_bias", "allowed_token_ids"} & plain.keys()


FIRST = TextEvent(
    texts=["a", ""],
    finish_reasons=["stop", None],
    cumulative_logprobs=[-1.0, float("nan")],
    logprobs=['[{"97": {}}]', "null"],
    output_token_counts=[1, 0],
    input_token_count=3,
)


def test_alternating_outputs_are_joined_by_index() -> None:
    """Streaming with n above 1, the real vLLM reports one output at a time."""
    nan = float("nan")
    neither: dict[str, Any] = {"finish_reasons": [None, None]}
    empty = replace(FIRST, **neither, texts=["", ""], logprobs=["[]", "null"],
                    cumulative_logprobs=[nan, nan], output_token_counts=[0, 0])  # fmt: skip
    other = replace(FIRST, **neither, texts=["", "b"],
                    cumulative_logprobs=[nan, -2.0], output_token_counts=[0, 2],
                    logprobs=["null", '[{"98": {}}, {"99": {}}]'])  # fmt: skip
    last = replace(other, texts=["", "c"], finish_reasons=[None, "length"], finish="stop")
    assert TextEvent.coalesce([FIRST, empty, other, last]) == TextEvent(
        texts=["a", "bc"],
        finish_reasons=["stop", "length"],
        cumulative_logprobs=[-1.0, -2.0],
        logprobs=['[{"97": {}}]', '[{"98": {}}, {"99": {}}, {"98": {}}, {"99": {}}]'],
        output_token_counts=[1, 4],
        input_token_count=3,
        finish="stop",
    )
    assert TextEvent.coalesce([empty, empty]).logprobs == ["[]", "null"]


def test_text_before_a_cancelled_event_is_passed_on() -> None:
    """A client gets an error for it, and no output beside."""
    cancelled = replace(FIRST, texts=["", ""], finish="cancelled")
    events = coalesce_events([(1, FIRST), (1, FIRST), (1, cancelled)])
    assert [(e.texts, e.finish) for _, e in events] == [
        (["aa", ""], None),
        (["", ""], "cancelled"),
    ]
