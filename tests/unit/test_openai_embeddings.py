"""POST /v1/embeddings over a transport that answers with embeddings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
import pytest
from openai_server import THREE, TOKENIZER, USER, Served, api, wait

from cog_triton.engines.base import Abilities
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import EMBEDDING, ERROR, STOP, StepItem
from cog_triton.serving.openai import embeddings
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


def test_fewer_run_at_once_while_there_is_less_room() -> None:
    transport = Transport(holds=True)
    with api(THREE, abilities=ABLE, transport=transport, slots=2, queue=0) as served:
        other = threading.Thread(target=embed, args=(served, "a"))
        other.start()
        assert wait(lambda: len(transport.sent) == 1)
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(embed(served, [[9], [9]])))
        thread.start()
        for count in (2, 3):
            assert wait(lambda count=count: len(transport.sent) == count)
            assert served.admission.running == 2
            transport.sent[count - 1].answer()
        thread.join()
        transport.sent[0].answer()
        other.join()
    assert len(answers[0].json()["data"]) == 2


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


REFUSED = [
    ({"input": "a"}, 400, "model: missing"),
    ({"model": "small"}, 400, "input: missing"),
    ({"model": "large", "input": "a"}, 404, "E1009"),
    ({"model": "small", "input": ""}, 400, "E1001 PromptRequired: input: blank"),
    ({"model": "small", "input": []}, 400, "input: blank"),
    ({"model": "small", "input": ["a", ""]}, 400, "input[1]: blank"),
    ({"model": "small", "input": ["a", "x" * 200_000]}, 400, "input[1]: "),
    ({"model": "small", "input": [9] * 901}, 400, "E1002"),
    ({"model": "small", "input": [[9], [9] * 901]}, 400, "input[1]: "),
    ({"model": "small", "input": [[9], [5000]]}, 400, "input[1]: holds 5000; must be from 0"),
    ({"model": "small", "input": [[9], "a"]}, 400, "input"),
    ({"model": "small", "input": "a", "dimensions": 0}, 400, "dimensions=0"),
    ({"model": "small", "input": "a", "encoding_format": "int8"}, 400, "encoding_format="),
    ({"model": "small", "input": "a", "truncate_prompt_tokens": 5}, 400, "not supported"),
    ({"model": "small", "input": ["a"] * 2049}, 400, "input: has 2049; 2048 at most"),
    ([], 400, "JSON object"),
]


def test_refusals() -> None:
    transport = Transport()
    with api(THREE, abilities=ABLE, transport=transport) as served:
        for body, status, words in REFUSED:
            answer = served.post("/v1/embeddings", body)
            assert answer.status_code == status, words
            assert words in answer.json()["error"]["message"]
    assert transport.sent == []


def test_what_changes_nothing_is_taken() -> None:
    with api(THREE, abilities=ABLE, transport=Transport()) as served:
        answer = embed(served, "a", normalize=True, truncate_prompt_tokens=None, priority=1)
    assert answer.status_code == 200


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


def test_fields_that_are_refused_are_no_fields() -> None:
    assert not embeddings._NEUTRAL.keys() & embeddings.EmbeddingsRequest.model_fields.keys()
