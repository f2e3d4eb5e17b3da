"""Tokens of texts and chats, and texts of tokens, as vLLM's server tells them."""

from __future__ import annotations

from openai_server import THREE, TOKENIZER, USER, api


def test_tokens_of_a_text_and_back() -> None:
    text = "the quick größer <|im_start|>"
    with api(THREE) as served:
        answer = served.post("/tokenize", {"model": "small", "prompt": text}).json()
        strings = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        back = served.post("/detokenize", {"model": "small", "tokens": answer["tokens"]}).json()
        assert served.triton.requests == []
    assert answer["tokens"] == TOKENIZER.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert (answer["max_model_len"], answer["token_strs"]) == (1000, None)
    assert len(strings["token_strs"]) == answer["count"]
    assert strings["token_strs"][-1] == "<|im_start|>"
    assert back == {"prompt": text}


def test_tokens_of_a_chat_are_those_of_its_prompt() -> None:
    with api(THREE) as served:
        found = served.post("/tokenize", {"messages": USER}).json()["tokens"]
        served.post("/v1/chat/completions", {"model": "small", "messages": USER})
        assert served.triton.requests[0].values["input_ids"] == found


REFUSED = [
    ("/tokenize", {}, 400, "either a prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "either a prompt or messages"),
    ("/tokenize", {"prompt": ["a"]}, 400, "prompt="),
    ("/tokenize", {"messages": []}, 400, "E1006"),
    ("/tokenize", {"messages": USER, "add_generation_prompt": False}, 400, "add_generation"),
    ("/tokenize", {"prompt": "a", "model": "large"}, 404, "E1009"),
    ("/tokenize", [], 400, "JSON object"),
    ("/tokenize", {"prompt": "x" * 200_000}, 400, "E1002"),
    ("/detokenize", {"tokens": [5000]}, 400, "tokens: holds 5000"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens: holds -1"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ("/detokenize", {}, 400, "tokens: missing"),
    ("/v1/embeddings", {"model": "small", "input": "a"}, 400, "'small': makes no embeddings"),
    ("/v1/embeddings", {"model": "large", "input": "a"}, 404, "E1009"),
]


def test_refusals() -> None:
    with api(THREE) as served:
        for path, body, status, words in REFUSED:
            answer = served.post(path, body)
            assert answer.status_code == status, words
            assert words in answer.json()["error"]["message"]


def test_a_prompt_that_is_no_unicode_text_is_refused() -> None:
    kind = {"Content-Type": "application/json"}
    with api(THREE) as served:
        answer = served.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=kind)
    assert answer.status_code == 400
    assert "prompt: not Unicode text" in answer.json()["error"]["message"]
