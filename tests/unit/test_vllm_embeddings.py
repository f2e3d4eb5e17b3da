"""Embeddings of vLLM's host, over the double: requests of both kinds, refusals, cancellation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_engines import MAX_MODEL_LEN, vllm_engine
from vllm_hosts import (
    ABC,
    Running,
    ask,
    failure,
    over_double,
    running,
    text,
    tokens,
)

from cog_triton.backend.vllm_tensors import parse_request
from cog_triton.engines.request import (
    EngineRequest,
    TokenEvent,
)
from cog_triton.engines.step_items import EMBEDDING, STOP, StepBuffer, StepItem, decode, merge
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    InvalidPredictorConfig,
    PromptRequired,
    PromptTooLong,
    VLLMUnknownError,
)
from cog_triton.text.sampling import SamplingParams

MATRYOSHKA = {"is_matryoshka": True, "hidden_size": 8}


def embedding(*numbers: float, size: int = 8) -> list[float]:
    """What the double makes of a prompt: these numbers, of length 1 together."""
    made = np.zeros(size, np.float32)
    made[: len(numbers)] = numbers
    return (made / np.linalg.norm(made)).tolist()  # type: ignore[no-any-return]


def of_tokens(ids: list[int], **values: Any) -> EngineRequest:
    return EngineRequest(
        input_ids=ids, sampling=SamplingParams(max_tokens=1), embeds=True, **values
    )


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A host with a model that makes embeddings."""
    values = {"runner": "pooling", "config": MATRYOSHKA}
    with over_double(tmp_path_factory.mktemp("pooling"), **values) as started:
        yield started


def test_an_embedding_comes_alone_with_the_end(pooling: Running) -> None:
    (event,) = ask(pooling.engine, of_tokens(ABC))
    assert event == TokenEvent([], [], "stop", embedding=embedding(3, *ABC))
    (event,) = ask(pooling.engine, of_tokens(ABC, dimensions=2))
    assert event.embedding == embedding(3, 97, size=2)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (of_tokens([1] * (MAX_MODEL_LEN + 1)), PromptTooLong, "longer than the maximum model"),
        (of_tokens(ABC, dimensions=9), InvalidArgument, "dimensions in range [1, 8], got 9"),
        (of_tokens([255]), VLLMUnknownError, "not finite"),
        (of_tokens(list(b"break the request")), VLLMUnknownError, "CUDA error: it broke"),
        (tokens(ABC), InvalidArgument, "does not support generation"),
        (text("abc"), InvalidArgument, "does not support generation"),
        (of_tokens(ABC, adapter="x"), InvalidArgument, "LoRA feature is not enabled"),
    ],
)
def test_what_cannot_be_embedded_gets_a_coded_error(
    pooling: Running, request_: Any, error: type[CogTritonError], words: str
) -> None:
    raised = failure(pooling.engine, request_)
    assert type(raised) is error
    assert words in raised.detail
    assert ask(pooling.engine, of_tokens(ABC))[0].finish == "stop", "the engine serves on"


@pytest.mark.usefixtures("vllm_environment")
def test_a_model_of_text_makes_no_embeddings(tmp_path: Path) -> None:
    with running(tmp_path) as host:
        raised = failure(host.engine, of_tokens(ABC))
    assert type(raised) is InvalidArgument
    assert "does not support pooling" in raised.detail


@pytest.mark.usefixtures("vllm_environment")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": {"architectures": ["BertModel"]}}, 'set it to "pooling"'),
        ({"convert": "classify"}, "no embeddings with this model; what it can do is classify"),
    ],
)
def test_model_json_must_say_what_the_model_makes(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidPredictorConfig) as raised, running(tmp_path, **arguments):
        pass
    assert words in raised.value.detail


@pytest.mark.parametrize(
    ("arguments", "embeds"),
    [
        ({}, False),
        ({"runner": "auto", "convert": "none"}, False),
        ({"runner": "generate"}, False),
        ({"runner": "pooling"}, True),
        ({"convert": "embed"}, True),
        ({"runner": "auto", "convert": "embed"}, True),
    ],
)
def test_the_family_tells_it_by_model_json(
    tmp_path: Path, arguments: dict[str, Any], embeds: bool
) -> None:
    family = VLLMFamily.open(vllm_engine(tmp_path / "engine", **arguments))
    assert (family.abilities.embeddings, family.abilities.generation) == (embeds, not embeds)
    assert family.limits.max_input_len == MAX_MODEL_LEN - (not embeds)
    if embeds:
        assert not family.abilities.guides


def test_embeddings_cross_as_step_items() -> None:
    buffer = StepBuffer()
    buffer.add(7, 0, TokenEvent([5], [], None))
    buffer.add(8, 0, TokenEvent([], [], "stop", embedding=[0.5, -0.25]))
    buffer.add(9, 0, TokenEvent([6], [-1.0], "stop"), 1)
    found = decode(*buffer.encoded())
    assert found[1] == StepItem(8, EMBEDDING, 0, [], [0.5, -0.25], STOP, None, 2)
    assert found[2].log_probs == [-1.0]
    assert merge(found) == found


def encode(text: str) -> list[int]:
    return list(text.encode())


def parsed(request: Any, *, embeds: bool = True, **values: Any) -> Any:
    content = request if isinstance(request, str) else json.dumps(request)
    inputs = {
        "text_input": np.array([b""], np.object_),
        "embedding_request": np.array([content.encode()], np.object_),
    }
    inputs |= {name: np.array([value]) for name, value in values.items()}
    return parse_request("vllm_model", inputs, {}, encode=encode if embeds else None)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"input": "abc"}, of_tokens(ABC)),
        ({"input": [1, 2], "model": "m"}, of_tokens([1, 2])),
        (
            {"input": "a", "pooling_params": {"dimensions": [2]}},
            of_tokens([97], dimensions=2),
        ),
        (
            {"input": "a", "pooling_params": {"dimensions": 2}},
            of_tokens([97], dimensions=2),
        ),
        ({"input": "a", "pooling_params": {}}, of_tokens([97])),
    ],
)
def test_embedding_request_is_that_of_vllm_backend(request_: Any, expected: EngineRequest) -> None:
    assert parsed(request_).request == expected


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("{", "embedding_request: not JSON"),
        ([], "must be a JSON object"),
        ({"input": [["a"]]}, "input: must be a text, or a list of token ids"),
        ({"input": "a", "inputs": 1}, "inputs: not taken; did you mean 'input'"),
        ({"input": "a", "pooling_params": {"normalize": 1}}, "normalize: not taken; known: dim"),
        ({"input": "a", "pooling_params": {"dimensions": "2"}}, "dimensions=2: must be a whole"),
        ({"input": "a", "pooling_params": {"dimensions": [1, 2]}}, "dimensions=[1, 2]: must be"),
    ],
)
def test_malformed_embedding_requests_are_refused(request_: Any, words: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parsed(request_)
    assert words in raised.value.detail


def test_an_empty_input_is_refused() -> None:
    with pytest.raises(PromptRequired):
        parsed({"input": ""})


def test_the_other_kind_of_request_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="vllm_model does not support 'embed' request"):
        parsed({"input": "a"}, embeds=False)
    inputs = {"text_input": np.array([b"a"], np.object_)}
    with pytest.raises(InvalidArgument, match="vllm_model does not support 'generate' request"):
        parse_request("vllm_model", inputs, {}, encode=encode)
    inputs["embedding_request"] = np.array([b'{"input": "a"}'], np.object_)
    with pytest.raises(InvalidArgument, match="dimensions: embeddings have no such parameter"):
        parse_request("vllm_model", inputs, {"dimensions": 2}, encode=encode)
