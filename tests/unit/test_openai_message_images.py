"""Images of /v1/messages: of a user's turn, and of a tool's result."""

from __future__ import annotations

import base64
from dataclasses import replace

from image_files import PARTS_TEMPLATE, PLACEHOLDER, image
from openai_server import THREE, TOKENIZER, api
from test_openai_images import Transport
from test_openai_messages import BODY, ask, events_of, user_turn

from cog_triton.engines.base import Abilities
from cog_triton.serving.openai.messages_request import NAMES, translate
from cog_triton.serving.openai.request_body import FieldNames


def test_images_reach_the_engine() -> None:
    raw = image()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(raw).decode()}
    block = {"type": "image", "source": source}
    content = [block, block, {"type": "text", "text": "What?"}]
    transport = Transport()
    pictures = replace(TOKENIZER, chat_template=PARTS_TEMPLATE)
    abilities = Abilities(images=3)
    with api(THREE, tokenizer=pictures, abilities=abilities, transport=transport) as served:  # type: ignore[arg-type]
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


def test_the_user_shows_the_images_of_tools() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [url]}
    turn = user_turn(result, {"type": "text", "text": "What?"})
    found = translate({**BODY, "messages": [turn]}, images=True)["messages"]
    assert found[0] == {"role": "tool", "tool_call_id": "a", "content": ""}
    assert [part["type"] for part in found[1]["content"]] == ["image_url", "text"]


def test_an_image_at_fault_is_named_as_it_was_sent() -> None:
    pictures = replace(TOKENIZER, chat_template=PARTS_TEMPLATE)
    url = {"type": "image", "source": {"type": "url", "url": "ftp://a.example/b.png"}}
    hello = {"role": "user", "content": "Hi"}
    asked = {
        "messages[0].content[0]": {"messages": [user_turn(url)]},
        "messages[1].content[1]": {
            "messages": [hello, user_turn({"type": "text", "text": "x"}, url)]
        },
    }
    with api(THREE, tokenizer=pictures, abilities=Abilities(images=3)) as served:
        for name, body in asked.items():
            found = served.post("/v1/messages", {**BODY, "system": "Rhyme.", **body})
            message = found.json()["error"]["message"]
            assert message.startswith(f"E1005 InvalidArgument: {name}"), message
            counted = {key: value for key, value in body.items() if key != "max_tokens"}
            counted |= {"model": "small", "system": "Rhyme."}
            found = served.post("/v1/messages/count_tokens", counted)
            assert found.json()["error"]["message"] == message


def test_an_image_of_a_tool_is_named_by_its_result() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [url]}
    names = FieldNames(NAMES)
    texts = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    last = user_turn(result, {"type": "text", "text": "x"})
    translate({**BODY, "messages": [*texts, last]}, images=True, names=names)
    told = names.renamed("messages[3].content[0].image_url.url: is wrong")
    assert told == "messages[2].content[0].content[0]: is wrong"
    assert names.renamed("messages[2]: is wrong") == "messages[2].content[0]: is wrong"


def test_an_image_of_a_response_is_named_as_it_was_sent() -> None:
    pictures = replace(TOKENIZER, chat_template=PARTS_TEMPLATE)
    parts = [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": "ftp://a"}]
    body = {
        "model": "small",
        "instructions": "Rhyme.",
        "input": [{"role": "user", "content": parts}],
    }
    with api(THREE, tokenizer=pictures, abilities=Abilities(images=3)) as served:
        found = served.post("/v1/responses", body)
    assert "E1005 InvalidArgument: input[0].content[1]: must be a data: URL" in found.text
