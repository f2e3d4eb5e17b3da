"""Images over the OpenAI API: what reaches the engine, what is told of them, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from chat_templates import QWEN
from image_files import PARTS_TEMPLATE, PLACEHOLDER, bomb, data_url, image, part, user
from openai_server import THREE, TOKENIZER, Served, api

from cog_triton.engines.base import Abilities
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import LENGTH, PROMPT, STOP, StepItem
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.text.tokenizer import EngineTokenizer

SEEN = Abilities(images=3)
PICTURES = EngineTokenizer(TOKENIZER.tokenizer, chat_template=PARTS_TEMPLATE)
A, B = image(color=0xFF0000), image("JPEG", (20, 20))


class Transport:
    """Answers each request with two tokens, and the length of its prompt; its own submission."""

    replica = 0

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.end = STOP

    def submit(
        self, request: EngineRequest, inputs: Mapping[str, Any], put: Callable[[StepItem], None]
    ) -> Any:
        self.requests.append(request)
        put(StepItem(1, PROMPT, 100 + len(request.images), [], []))
        put(StepItem(1, 0, 0, TOKENIZER.encode("ok"), [], self.end))
        return self

    def cancel(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def served(transport: Transport) -> Iterator[Served]:
    with api(THREE, tokenizer=PICTURES, abilities=SEEN, transport=transport) as running:  # type: ignore[arg-type]
        yield running


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [user(*parts)], **fields}


def test_images_reach_the_engine_in_their_order(served: Served, transport: Transport) -> None:
    body = chat("a", part(data_url(A)), part(data_url(B), detail="low"), "b", max_tokens=5)
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 102
    (request,) = transport.requests
    assert request.images == (
        ImagePart("messages[0].content[1].image_url", A),
        ImagePart("messages[0].content[2].image_url", B),
    )
    prompt = TOKENIZER.tokenizer.decode(list(request.input_ids))
    assert prompt == f"user:a{PLACEHOLDER * 2}b;"


def test_streams_and_metrics_count_the_tokens_of_images(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat(part(data_url(A)), stream=True, stream_options=options)
    answer = served.post("/v1/chat/completions", body)
    *_, last, _ = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert json.loads(last)["usage"]["prompt_tokens"] == 101
    ((request, result, _),) = served.ended
    assert result.prompt_tokens(request) == 101


def test_the_end_is_what_the_engine_says_where_images_take_room(
    served: Served, transport: Transport
) -> None:
    transport.end = LENGTH
    for content, expected in (([part(data_url(A))], "length"), (["a"], "stop")):
        answer = served.post("/v1/chat/completions", chat(*content, max_tokens=500))
        assert answer.json()["choices"][0]["finish_reason"] == expected


def test_responses_take_input_image(served: Served, transport: Transport) -> None:
    content = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": data_url(A), "detail": "auto"},
    ]
    body = {"model": "small", "input": [{"role": "user", "content": content}]}
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] == 101
    assert [one.data for one in transport.requests[0].images] == [A]
    content[1] = {"type": "input_image", "file_id": "file-1"}
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 400
    assert "file_id: not supported" in answer.text


def test_sequences_share_their_images(served: Served, transport: Transport) -> None:
    answer = served.post("/v1/chat/completions", chat(part(data_url(A)), n=2))
    assert answer.json()["usage"]["prompt_tokens"] == 101
    assert [len(request.images) for request in transport.requests] == [1, 1]


@pytest.mark.parametrize(
    ("parts", "code", "words"),
    [
        ([part(data_url(A))] * 4, "E1005", "messages: has 4 images; 3 at most (MAX_IMAGES)"),
        ([part(data_url(A))] * 50, "E1005", "messages: has 50 images"),
        ([part(data_url(bomb()))], "E1005", "is of 50000x50000 pixels"),
        ([part(data_url(A)[:60])], "E1005", "messages[0].content[0].image_url: is "),
        (["a", part(data_url(b"GIF89a"))], "E1005", "messages[0].content[1].image_url: is broken"),
        ([part("data:text/plain,hi")], "E1005", "must be data:image"),
        ([part("file:///etc/passwd")], "E1005", "must be a data: URL, or one of http(s)://"),
        ([part("/etc/passwd")], "E1005", "must be a data: URL, or one of http(s)://"),
        ([part("http://127.0.0.1/")], "E1005", "fetched from no host (IMAGE_HOSTS)"),
        ([part("")], "E1005", "must be a data: URL"),
        ([part(7)], "E1006", "image_url.url: must be text"),  # type: ignore[arg-type]
        ([{"type": "video_url"}], "E1006", "must be 'text' or 'image_url'"),
    ],
)
def test_refusals_name_the_part(
    served: Served, transport: Transport, parts: list[Any], code: str, words: str
) -> None:
    answer = served.post("/v1/chat/completions", chat(*parts))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert words in error["message"]
    assert transport.requests == []


def test_images_are_not_counted_by_tokenize(served: Served) -> None:
    answer = served.post("/tokenize", chat(part(data_url(A))))
    assert "only the engine knows the tokens of images" in answer.text
    answer = served.post("/tokenize", chat("abc"))
    assert answer.json()["count"] == len(TOKENIZER.encode("user:abc;"))


@pytest.mark.parametrize(
    ("abilities", "template", "count"),
    [
        (Abilities(images=3), PARTS_TEMPLATE, 3),
        (Abilities(images=999), PARTS_TEMPLATE, 16),
        (Abilities(), PARTS_TEMPLATE, 0),
        (Abilities(images=3), QWEN, 0),
        (Abilities(images=3, image_placeholder="<image>"), QWEN, 3),
    ],
)
def test_models_tell_how_many_images_they_take(
    abilities: Abilities, template: str, count: int
) -> None:
    made = EngineTokenizer(TOKENIZER.tokenizer, chat_template=template)
    with api(THREE, tokenizer=made, abilities=abilities, transport=Transport()) as running:  # type: ignore[arg-type]
        (model,) = running.client().models.list().data
        assert model.model_dump()["capabilities"]["images"] == count
        answer = running.post("/v1/chat/completions", chat(part(data_url(A))))
        assert answer.status_code == (200 if count else 400), answer.text
        if not count:
            assert answer.json()["error"]["code"] == "E1006"
            assert "this model reads text alone" in answer.text
