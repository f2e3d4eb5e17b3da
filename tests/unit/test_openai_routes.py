"""OpenAI API responses, seen by OpenAI's own client."""

from __future__ import annotations

import json
from datetime import datetime
from threading import Event

import httpx
import openai
import pytest
from openai_server import THREE, TOKENIZER, USER, api, tokens
from scripted_server import PATIENCE_S


def test_a_chat_is_rendered_generated_and_counted() -> None:
    with api(THREE) as served:
        answer = served.client().chat.completions.create(
            model="small", messages=USER, temperature=0, max_tokens=90, seed=5
        )
        sent = served.triton.requests[0].values
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "the quick größer")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert (answer.object, answer.model) == ("chat.completion", "small")
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sent["input_ids"] == TOKENIZER.encode(text, add_special_tokens=False)
    assert (sent["temperature"], sent["request_output_len"], sent["seed"]) == (0, 90, 5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(sent["input_ids"])
    assert answer.usage.completion_tokens == sum(
        len(TOKENIZER.encode(text)) for text in ("the ", "quick ", "größer")
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_sends_each_chunk_as_it_is_generated() -> None:
    texts = ["the ", "quick ", "fox"]
    seen = [Event() for _ in texts]
    parts = [part for both in zip(tokens(*texts), seen, strict=True) for part in both]
    with api(parts) as served:
        chunks = served.client().chat.completions.create(
            model="small", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        first = next(chunks)
        assert first.choices[0].delta.role == "assistant"
        said = first.choices[0].delta.content or ""
        for text, it in zip(texts, seen, strict=True):
            while not said.endswith(text):
                said += next(chunks).choices[0].delta.content or ""
            it.set()
        closing, usage = list(chunks)
    assert said == "the quick fox"
    assert closing.choices[0].finish_reason == "stop"
    assert closing.usage is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == sum(len(TOKENIZER.encode(text)) for text in texts)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_continuous_usage_stats_are_in_every_chunk(path: str) -> None:
    texts = ["the ", "quick ", "fox"]
    seen = [Event() for _ in texts]
    parts = [part for both in zip(tokens(*texts), seen, strict=True) for part in both]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "small", "stream": True, "stream_options": options}
    body |= {"prompt": "the"} if path == "completions" else {"messages": USER}
    said, usages = "", []
    with (
        api(parts) as served,
        httpx.stream("POST", f"{served.url}/v1/{path}", json=body, timeout=PATIENCE_S) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            usages.append(piece["usage"])
            for choice in piece["choices"]:
                said += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            come = [len(TOKENIZER.encode(text)) for text in texts if text in said]
            assert usages[-1]["completion_tokens"] == sum(come)
            for text, it in zip(texts, seen, strict=True):
                if text in said:
                    it.set()
    assert said == "the quick fox"
    assert len(usages) >= len(texts) + 2
    assert usages[-1] == usages[-2]
    assert len({usage["prompt_tokens"] for usage in usages}) == 1


def test_default_stops_and_system_prompt_apply_unless_given() -> None:
    with api(THREE, stop_sequences="quick", system_prompt="Rhyme.") as served:
        chat = served.client().chat.completions
        assert chat.create(model="small", messages=USER).choices[0].message.content == "the "
        rest = chat.create(model="small", messages=USER, stop="r")
        assert rest.choices[0].message.content == "the quick g"
        ids = served.triton.requests[0].values["input_ids"]
    assert "Rhyme." in TOKENIZER.tokenizer.decode(ids)


def test_missing_log_probabilities_are_an_error() -> None:
    with api(THREE) as served, pytest.raises(openai.InternalServerError, match="E2104"):
        served.client().chat.completions.create(model="small", messages=USER, logprobs=True)


def test_ignore_eos_and_other_extras_reach_the_engine() -> None:
    with api(THREE) as served:
        served.client().chat.completions.create(
            model="small",
            messages=USER,
            extra_body={"ignore_eos": True, "top_k": 7, "repetition_penalty": 1.5, "min_tokens": 2},
        )
        sent = served.triton.requests[0].values
    assert (sent["end_id"], sent["runtime_top_k"]) == (-1, 7)
    assert (sent["repetition_penalty"], sent["min_tokens"]) == (1.5, 2)


def test_models_are_listed() -> None:
    with api(THREE) as served:
        (model,) = served.client().models.list().data
        assert (model.id, model.object, model.owned_by) == ("small", "model", "cog-triton")
        assert served.client().models.retrieve("small").id == "small"
        with pytest.raises(openai.NotFoundError, match="E1009"):
            served.client().models.retrieve("large")
        with pytest.raises(openai.NotFoundError, match=r"'large'.*'small'"):
            served.client().completions.create(model="large", prompt="Hi")
        urls = [f"{served.url}/v1/models{path}" for path in ("", "/small")]
        version = {"anthropic-version": "2023-06-01"}
        page, one = (httpx.get(url, headers=version).json() for url in urls)
    ends = {"first_id": "small", "last_id": "small", "has_more": False}
    assert page == {"data": [one], **ends}
    assert datetime.fromisoformat(one.pop("created_at")).timestamp() == model.created
    known = {"type": "model", "id": "small", "display_name": "small", "lifecycle": "active"}
    assert known.items() <= one.items()


def test_every_answer_has_an_id_that_of_a_generation_is_its_own() -> None:
    with api(THREE) as served, httpx.Client(base_url=served.url) as http:
        body = {"model": "small", "messages": USER}
        whole = http.post("/v1/chat/completions", json=body)
        assert whole.headers["x-request-id"] == whole.json()["id"]
        refused = http.post("/v1/chat/completions", json={**body, "n": 99999})
        assert refused.status_code == 400
        others = [refused, *(http.get("/v1/models") for _ in range(2)), http.get("/v1/nothing")]
        ids = [answer.headers.get_list("x-request-id") for answer in others]
        assert all(len(each) == 1 and each[0] for each in ids)
        assert len({each[0] for each in ids}) == len(ids)
