"""Several sequences of a request: n, best_of and lists of prompts, as OpenAI's client sees them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from openai_server import THREE, TOKENIZER, USER, Served, api, tokens, wait
from scripted_server import HANG, PATIENCE_S, Part
from scripted_triton import Request, event

from cog_triton.errors import TritonUnknownError

NAMES = ["zero", "one", "two", "three", "four", "five"]


def seeded(request: Request) -> Iterable[Part]:
    """Answers with the name of the request's seed."""
    return tokens("number ", NAMES[request.values["seed"] % 10])


def post(served: Served, path: str = "completions", **fields: Any) -> httpx.Response:
    body = {"model": "small", "seed": 0, **fields}
    body |= {"messages": USER} if path == "chat/completions" else {}
    return served.post(f"/v1/{path}", body)


def test_n_answers_of_a_chat_have_seeds_of_their_own() -> None:
    with api(seeded) as served:
        answer = served.client().chat.completions.create(
            model="small", messages=USER, n=3, seed=2, max_tokens=90
        )
        prompt = len(served.triton.requests[0].values["input_ids"])
    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["number two", "number three", "number four"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt
    made = sum(len(TOKENIZER.encode(text)) for text in ("number ", "two", "three", "four"))
    assert answer.usage.completion_tokens == made + 2 * len(TOKENIZER.encode("number "))


def test_without_a_seed_no_two_sequences_have_the_same() -> None:
    with api(THREE, slots=8) as served:
        post(served, prompt=["a", "b"], n=3, seed=None)
        seeds = {request.values["seed"] for request in served.triton.requests}
    assert len(seeds) == 6


def test_prompts_come_in_order_with_n_choices_each() -> None:
    with api(seeded) as served:
        answer = post(served, prompt=["a", "bb"], n=2, seed=1).json()
        sent = Counter(tuple(request.values["input_ids"]) for request in served.triton.requests)
    assert [choice["text"] for choice in answer["choices"]] == ["number one", "number two"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [TOKENIZER.encode("a"), TOKENIZER.encode("bb")]
    assert sent == {tuple(ids): 2 for ids in prompts}
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_has_the_chunks_of_all_by_index(path: str) -> None:
    fields = {} if path == "chat/completions" else {"prompt": "a"}
    with api(seeded) as served:
        answer = post(
            served, path, n=3, stream=True, stream_options={"include_usage": True}, **fields
        )
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, events)
    said, ends = dict.fromkeys(range(3), ""), []
    for (choice,) in (chunk["choices"] for chunk in chunks):
        assert choice["index"] not in ends
        said[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert list(said.values()) == ["number zero", "number one", "number two"]
    assert sorted(ends) == [0, 1, 2]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(
        result.output_token_count for _, result, _ in served.ended
    )


def test_best_of_answers_with_the_likeliest() -> None:
    def answer(request: Request) -> Iterable[Part]:
        assert request.values["return_log_probs"]
        seed = request.values["seed"]
        ids = TOKENIZER.encode(NAMES[seed])
        total = [-3.0, -1.0, -2.0, -9.0][seed] * len(ids)
        return [event(output_ids=ids, output_log_probs=[total / len(ids)] * len(ids))]

    with api(answer) as served:
        made = post(served, prompt="a", n=2, best_of=4).json()
        refused = post(served, prompt="a", n=2, best_of=4, stream=True)
    assert [choice["text"] for choice in made["choices"]] == ["one", "two"]
    assert [choice["index"] for choice in made["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in made["choices"]] == [None, None]
    assert made["usage"]["completion_tokens"] == sum(len(TOKENIZER.encode(x)) for x in NAMES[:4])
    assert refused.status_code == 400


def test_no_more_are_asked_for_than_run_or_wait() -> None:
    with api(THREE, slots=4, queue=2) as served:
        answer = post(served, prompt="a", n=7)
        assert served.triton.requests == []
    assert answer.status_code == 400
    assert "n: 7 sequences; 6 run or wait at most (MAX_CONCURRENCY" in answer.text


def test_each_sequence_takes_a_place_and_gives_it_back_when_it_ends() -> None:
    def answer(request: Request) -> Iterable[Part]:
        return [*tokens("a"), *([HANG] if request.values.get("seed") else [])]

    with api(answer, slots=3, queue=0) as served:
        with served.client().completions.create(
            model="small", prompt="a", n=3, seed=0, stream=True
        ) as running:
            ended = [chunk.choices[0] for chunk in (next(running) for _ in range(4))]
            assert [choice.finish_reason for choice in ended if choice.index == 0] == [None, "stop"]
            assert served.admission.running == 2
            refused = post(served, prompt="a", n=2)
            assert refused.status_code == 429
            assert len(served.triton.requests) == 3
        assert wait(lambda: served.admission.running == 0)
        left = [request.left for request in served.triton.requests if request.values.get("seed")]
        assert all(event.wait(PATIENCE_S) for event in left)
    outcomes = sorted(result.cancelled for _, result, _ in served.ended)
    assert outcomes == [False, True, True]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_of_one_ends_all(streamed: bool) -> None:
    def scripted(request: Request) -> Iterable[Part]:
        if request.values["seed"] == 1:
            return [event(error="it broke")]
        return [HANG]

    with api(scripted) as served:
        answer = post(served, prompt="a", n=3, stream=streamed)
        assert "it broke" in answer.json()["error"]["message"]
        assert wait(lambda: served.admission.running == 0)
        left = [one.left for one in served.triton.requests if one.values.get("seed") in (0, 2)]
        assert all(event.wait(PATIENCE_S) for event in left)
    errors = [error for _, _, error in served.ended if error is not None]
    assert [type(error) for error in errors] == [TritonUnknownError]
    assert sum(result.cancelled for _, result, _ in served.ended) == 2
