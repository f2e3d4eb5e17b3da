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


def test_a_prompt_that_is_no_unicode_text_is_refused() -> None:
    kind = {"Content-Type": "application/json"}
    with api(THREE) as served:
        answer = served.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=kind)
    assert answer.status_code == 400
    assert "prompt: not Unicode text" in answer.json()["error"]["message"]
