"""POST /v1/embeddings over a transport that answers with embeddings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import httpx
import pytest
from openai_server import THREE, TOKENIZER, USER, Served, api, wait

from cog_triton.engines.base import Abilities
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import EMBEDDING, ERROR, STOP, StepItem
from cog_triton.triton.infer_stream import Put

ABLE = Abilities(generation=False, embeddings=True)


class Submitted:
    replica = 0

    def __init__(self, request: EngineRequest, put: Put) -> None:
        loop = asyncio.get_running_loop()
        self.request, self.put = request, partial(loop.call_soon_threadsafe, put)
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def answer(self) -> None:
        """The prompt's length, and halves, as many as are asked for."""
        numbers = [
            float(len(self.request.input_ids)),
            *[0.5] * ((self.request.dimensions or 3) - 1),
        ]
        self.put(StepItem(1, EMBEDDING, 0, [], numbers, STOP, None, len(numbers)))


class Transport:
    """Answers at once, unless `holds`; a prompt of one token 0 fails."""

    last_token_at = 0.0

    def __init__(self, *, holds: bool = False) -> None:
        self.holds = holds
        self.sent: list[Submitted] = []

    def submit(self, request: EngineRequest, inputs: Mapping[str, Any], put: Put) -> Submitted:
        submitted = Submitted(request, put)
        self.sent.append(submitted)
        if list(request.input_ids) == [0]:
            put(StepItem(1, 0, 0, [], [], ERROR, "E2200 VLLMUnknownError: it broke"))
        elif list(request.input_ids) == [1]:
            put(StepItem(1, 0, 0, [], [], STOP))
        elif not self.holds:
            submitted.answer()
        return submitted

    async def open(self, generations: Mapping[int, int]) -> None: ...
    async def disconnect(self) -> None: ...


@pytest.fixture(scope="module")
def refusing() -> Iterator[Served]:
    with api(THREE, abilities=ABLE, transport=Transport()) as served:
        yield served


def embed(served: Served, given: Any, **fields: Any) -> httpx.Response:
    return served.post("/v1/embeddings", {"model": "small", "input": given, **fields})


def length(text: str) -> int:
    return len(TOKENIZER.encode(text))


def test_one_text_is_answered_as_openai_does() -> None:
    with api(THREE, abilities=ABLE, transport=Transport()) as served:
        answer = embed(served, "the quick").json()
        (request, result, error), *_ = served.ended
        metrics = served.metrics.text().decode()
    count = length("the quick")
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [count, 0.5, 0.5]}],
        "model": "small",
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    assert (request.endpoint, result.finish_reason, error) == ("embeddings", "stop", None)
    assert 'cog_triton_requests_total{endpoint="embeddings",outcome="stop"} 1.0' in metrics


def test_openais_client_reads_it() -> None:
    with api(THREE, abilities=ABLE, transport=Transport()) as served:
        client = served.client()
        asked = client.embeddings.create(model="small", input=["a", "the quick"])  # in base64
        plain = client.embeddings.create(
            model="small", input=[[5, 6], [7]], dimensions=2, encoding_format="float"
        )
    assert [item.embedding for item in asked.data] == [
        [length("a"), 0.5, 0.5],
        [length("the quick"), 0.5, 0.5],
    ]
    assert [(item.index, item.embedding) for item in plain.data] == [(0, [2, 0.5]), (1, [1, 0.5])]
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 3


def test_many_inputs_run_within_bounds() -> None:
    transport = Transport(holds=True)
    with api(THREE, abilities=ABLE, transport=transport, slots=2, queue=0) as served:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(embed(served, [[9]] * 5)))
        thread.start()
        for done in (2, 4, 5):
            assert wait(lambda done=done: len(transport.sent) == done)
            assert served.admission.running == min(2, done - 2 * ((done - 1) // 2))
            for submitted in transport.sent[2 * ((done - 1) // 2) :]:
                submitted.answer()
        thread.join()
    assert [item["index"] for item in answers[0].json()["data"]] == [0, 1, 2, 3, 4]


def test_one_that_fails_ends_them_all() -> None:
    transport = Transport(holds=True)
    with api(THREE, abilities=ABLE, transport=transport) as served:
        answer = embed(served, [[9], [0]])
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "E2200"
        assert transport.sent[0].cancelled.is_set()
        assert served.admission.running == 0


def test_an_end_without_an_embedding_is_an_error() -> None:
    with api(THREE, abilities=ABLE, transport=Transport()) as served:
        answer = embed(served, [1])
    assert answer.json()["error"]["code"] == "E2104"


@pytest.mark.parametrize(
    ("fields", "status", "code", "named"),
    [
        ({}, 400, "E1005", "input"),
        ({"model": "large", "input": "a"}, 404, "model_not_found", "model"),
        ({"input": ""}, 400, "E1001", "input"),
        ({"input": []}, 400, "E1001", "input"),
        ({"input": ["a", ""]}, 400, "E1001", "input[1]"),
        ({"input": [9] * 901}, 400, "context_length_exceeded", "Prompt length (901)"),
        ({"input": [[9], [9] * 901]}, 400, "context_length_exceeded", "input[1]"),
        ({"input": [[9], [5000]]}, 400, "E1005", "input[1]"),
        ({"input": [[9], "a"]}, 400, "E1005", "input"),
        ({"input": "a", "dimensions": 0}, 400, "E1005", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "E1005", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 5}, 400, "E1005", "truncate_prompt_tokens"),
        ({"input": ["a"] * 2049}, 400, "E1005", "input"),
    ],
)
def test_a_wrong_input_is_refused_by_name(
    refusing: Served, fields: dict[str, Any], status: int, code: str, named: str
) -> None:
    answer = refusing.post("/v1/embeddings", {"model": "small", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert f": {named}" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "small", "messages": USER}),
        ("/v1/completions", {"model": "small", "prompt": "a"}),
        ("/v1/responses", {"model": "small", "input": "a"}),
    ],
)
def test_a_model_of_embeddings_generates_no_text(path: str, body: Any) -> None:
    with api(THREE, abilities=ABLE, transport=Transport()) as served:
        answer = served.post(path, body)
        assert answer.status_code == 400
        assert "E1005 InvalidArgument: this model makes embeddings" in answer.text
        assert "/v1/embeddings" in answer.json()["error"]["message"]
        capabilities = served.client().models.list().data[0].capabilities  # type: ignore[attr-defined]
    assert (capabilities["generation"], capabilities["embeddings"]) == (False, True)
