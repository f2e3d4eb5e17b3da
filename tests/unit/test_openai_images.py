"""Images over the OpenAI API: what reaches the engine, what is told of them, and refusals."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from chat_templates import QWEN
from image_files import PARTS_TEMPLATE, PLACEHOLDER, bomb, data_url, image, part, user
from openai_server import THREE, TOKENIZER, Served, api
from test_openai_messages import BODY, ask, events_of, user_turn

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
        ([part(data_url(bomb()))], "E1005", "messages[0].content[0].image_url: is of"),
        (["a", part(data_url(b"GIF89a"))], "E1005", "messages[0].content[1].image_url: is broken"),
        ([part("file:///etc/passwd")], "E1005", "messages[0].content[0].image_url: "),
        ([part("http://127.0.0.1/")], "E1005", "IMAGE_HOSTS"),
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


# Images of /v1/messages: of a user's turn, and of a tool's result.


def test_images_of_messages_reach_the_engine() -> None:
    raw = image()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(raw).decode()}
    block = {"type": "image", "source": source}
    content = [block, block, {"type": "text", "text": "What?"}]
    transport = Transport()
    with api(THREE, tokenizer=PICTURES, abilities=SEEN, transport=transport) as served:  # type: ignore[arg-type]
        answer = ask(served, messages=[{"role": "user", "content": content}])
        last = events_of(served, messages=[{"role": "user", "content": content}])[-2]
        refused = served.post(
            "/v1/messages/count_tokens",
            {"model": "small", "messages": [{"role": "user", "content": content}]},
        )
        url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
        fetched = served.post("/v1/messages", {**BODY, "messages": [user_turn(url)]})
    (first, _) = transport.requests
    assert [part.data for part in first.images] == [raw, raw]
    assert f"{PLACEHOLDER * 2}What?" in TOKENIZER.tokenizer.decode(list(first.input_ids))
    assert answer["usage"]["input_tokens"] == last["usage"]["input_tokens"] == 102
    assert "only the engine knows" in refused.json()["error"]["message"]
    assert "IMAGE_HOSTS" in fetched.json()["error"]["message"]


def test_an_image_at_fault_is_named_as_it_was_sent() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "ftp://a.example/b.png"}}
    hello = {"role": "user", "content": "Hi"}
    asked = {
        "messages[0].content[0]": {"messages": [user_turn(url)]},
        "messages[1].content[1]": {
            "messages": [hello, user_turn({"type": "text", "text": "x"}, url)]
        },
    }
    with api(THREE, tokenizer=PICTURES, abilities=SEEN) as served:
        for name, body in asked.items():
            found = served.post("/v1/messages", {**BODY, "system": "Rhyme.", **body})
            message = found.json()["error"]["message"]
            assert message.startswith(f"E1005 InvalidArgument: {name}"), message
            counted = {key: value for key, value in body.items() if key != "max_tokens"}
            counted |= {"model": "small", "system": "Rhyme."}
            found = served.post("/v1/messages/count_tokens", counted)
            assert found.json()["error"]["message"] == message


def test_an_image_of_a_response_is_named_as_it_was_sent() -> None:
    parts = [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": "ftp://a"}]
    body = {
        "model": "small",
        "instructions": "Rhyme.",
        "input": [{"role": "user", "content": parts}],
    }
    with api(THREE, tokenizer=PICTURES, abilities=SEEN) as served:
        found = served.post("/v1/responses", body)
    assert "E1005 InvalidArgument: input[0].content[1]: must be a data: URL" in found.text
