"""Log probabilities of the likeliest tokens and of echoed prompts, from the mock engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_transport import EngineTransport
from openai_server import THREE, USER, Served, api

from cog_triton.engines.base import Abilities
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.mock.mock_directory import make_engine, read_model
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.serving.openai import sequences
from cog_triton.text.tokenizer import EngineTokenizer

PROMPT = "the quick größer"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> EngineTokenizer:
    return EngineTokenizer.load(directory)


@pytest.fixture
def served(directory: Path, tokenizer: EngineTokenizer) -> Iterator[Served]:
    engine = MockEngine(read_model(directory), MockOptions(tps=0))
    transport = EngineTransport(engine)
    abilities = MockFamily.open(directory).abilities
    with api(THREE, tokenizer=tokenizer, abilities=abilities, transport=transport) as made:
        yield made


def complete(served: Served, **fields: Any) -> dict[str, Any]:
    answer = served.post("/v1/completions", {"model": "small", "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


def pieces(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = served.post(f"/v1/{path}", {"model": "small", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *events, _ = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The log probabilities of a completion's chunks, one after the other."""
    whole: dict[str, Any] = {}
    for piece in found:
        for name, values in (piece["logprobs"] or {}).items():
            whole[name] = (whole.get(name) or []) + values if values is not None else None
    return whole


@pytest.mark.parametrize("streamed", [False, True])
def test_top_logprobs_of_a_chat(served: Served, streamed: bool) -> None:
    body = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    if streamed:
        found = pieces(served, "chat/completions", **body)
        content = [
            item for piece in found if piece["logprobs"] for item in piece["logprobs"]["content"]
        ]
    else:
        answer = served.post("/v1/chat/completions", {"model": "small", **body})
        content = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for item in content:
        first, second = item["top_logprobs"]
        assert (
            (first["token"], first["logprob"])
            == (item["token"], item["logprob"])
            == (item["token"], 0)
        )
        assert bytes(first["bytes"]).decode() == first["token"]
        assert (second["token"] == first["token"], second["logprob"]) == (False, -1)


def test_top_logprobs_of_a_completion_are_by_text(served: Served) -> None:
    choice = complete(served, max_tokens=4, logprobs=3)
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert [len(top) for top in found["top_logprobs"]] == [3] * 4
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert max(top, key=top.__getitem__) == token
        assert top[token] == value


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_begins_with_the_prompt(
    served: Served, tokenizer: EngineTokenizer, streamed: bool, logprobs: int | None, as_ids: bool
) -> None:
    ids = tokenizer.encode(PROMPT)
    body = {"prompt": ids if as_ids else PROMPT, "max_tokens": 3, "logprobs": logprobs}
    plain = complete(served, **body)
    body["echo"] = True
    if streamed:
        found = pieces(served, "completions", **body)
        text, told = "".join(piece["text"] for piece in found), joined(found)
    else:
        choice = complete(served, **body)
        text, told = choice["text"], choice["logprobs"]
    assert text == PROMPT + plain["text"]
    if logprobs is None:
        assert not told
        return
    count = len(ids)
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1:count] == [-1.0] * (count - 1)
    assert told["token_logprobs"][count:] == plain["logprobs"]["token_logprobs"]
    assert told["tokens"][count:] == plain["logprobs"]["tokens"]
    assert told["text_offset"] == sorted(told["text_offset"])
    if logprobs:
        assert told["top_logprobs"][0] is None
        # Parts of a character have one text, so fewer may be told of them.
        assert all(1 <= len(top) <= logprobs for top in told["top_logprobs"][1:])
        assert [len(top) for top in told["top_logprobs"][count:]] == [logprobs] * 3


def test_each_of_several_answers_is_echoed(served: Served) -> None:
    body = {"model": "small", "prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 2}
    choices = served.post("/v1/completions", body).json()["choices"]
    assert [choice["text"][0] for choice in choices] == ["a", "a", "b", "b"]


def test_what_an_engine_does_not_tell_is_refused_by_name() -> None:
    refusals: list[tuple[Abilities, dict[str, Any], str]] = [
        (Abilities(), {"logprobs": 1}, "logprobs=1: not supported: this engine tells the"),
        (Abilities(), {"logprobs": 0, "echo": True}, "echo: not supported with logprobs"),
        (Abilities(top_log_probs=3), {"logprobs": 4}, "logprobs=4: at most 3 on this engine"),
        (Abilities(top_log_probs=3), {"max_tokens": 0}, "max_tokens=0: only allowed with echo"),
    ]
    for abilities, fields, words in refusals:
        with api(THREE, abilities=abilities) as served:
            answer = served.post("/v1/completions", {"model": "small", "prompt": "a", **fields})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]


def test_echo_needs_nothing_of_the_engine() -> None:
    with api(THREE) as served:
        assert complete(served, echo=True)["text"] == f"{PROMPT}the quick größer"


def test_only_a_limit_of_the_clients_own_is_refused_for_log_probabilities(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 x 2 log probabilities a token, 120 are those of 20 tokens."""
    monkeypatch.setattr(sequences, "MAX_LOG_PROBS", 120)
    body = {"model": "small", "messages": USER, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert 0 < len(choice["logprobs"]["content"]) <= 20
    refused = served.post("/v1/chat/completions", {**body, "max_tokens": 21})
    assert refused.status_code == 400
    assert "logprobs: up to 126 log probabilities" in refused.text
