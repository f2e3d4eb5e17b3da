"""Responses of the text models: indices, sequences, beams, batches; their tensors live long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_tokenizers import byte_level

from cog_triton.backend.answers import EngineResponse, TextPart, joined
from cog_triton.backend.text_inputs import Prompt, Tensors
from cog_triton.text.tokenizer import EngineTokenizer

TOKENIZER = EngineTokenizer(byte_level())
ALL = ("text_output", "output_ids", "batch_index", "sequence_index")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def prompt(**values: Any) -> Prompt:
    plain: dict[str, Any] = {
        "ids": ids("Q:"),
        "stop_words": [],
        "min_tokens": 0,
        "streaming": False,
        "echo": False,
        "beams": 1,
        "sequences": 1,
        "engine": {"streaming": np.array([[True]])},
    }
    return Prompt(**{**plain, **values})


def responses(outputs: tuple[str, ...] = ALL, place: int = 0, **values: Any) -> TextPart:
    return TextPart(None, TOKENIZER, prompt(**values), outputs, batch_index=place)


def response(*beams: str, index: int = 0, **outputs: Any) -> EngineResponse:
    return EngineResponse([ids(text) for text in beams], outputs, index)


def plain(tensors: Tensors) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def test_a_text_has_no_dimension_of_the_batch_and_indices_have_one() -> None:
    found = responses(place=3)
    assert found.feed(response("a")) == []
    (last,) = found.finish()
    assert plain(last) == {
        "text_output": [b"a"],
        "output_ids": [ids("a")],
        "batch_index": [[3]],
        "sequence_index": [[0]],
    }


@pytest.mark.parametrize("echo", [True, False])
def test_output_ids_of_all_responses_follow_the_prompt_once(echo: bool) -> None:
    found = responses(echo=echo)
    found.feed(response("ab"))
    found.feed(response("c"))
    (last,) = found.finish()
    assert last["output_ids"].tolist() == [ids("Q:abc" if echo else "abc")]
    assert last["text_output"].tolist() == [b"Q:abc" if echo else b"abc"]


def test_streamed_output_ids_are_those_of_each_text() -> None:
    found = responses(streaming=True)
    sent = [tensors for text in ("ab", "c") for tensors in found.feed(response(text))]
    assert [tensors["output_ids"].tolist() for tensors in sent] == [[ids("ab")], [ids("c")]]


def test_sequences_by_turns_have_texts_and_stops_of_their_own() -> None:
    found = responses(sequences=2, streaming=True, stop_words=["."])
    sent = [
        *found.feed(response("a", index=0)),
        *found.feed(response("b", index=1)),
        *found.feed(response(".x", index=0)),
        *found.feed(response("lost", index=0)),
    ]
    assert not found.finished
    sent += found.feed(response("c.", index=1))
    assert found.finished
    sent += found.finish()
    texts = [(t["sequence_index"].item(), t["text_output"].item()) for t in sent if t]
    assert [text for text in texts if text[1]] == [(0, b"a"), (1, b"b"), (1, b"c")]


def test_beams_come_in_one_response() -> None:
    found = responses(beams=2, echo=True, stop_words=["."])
    (sent,) = found.feed(response("ab.c", "d"))
    assert sent["text_output"].tolist() == [b"Q:ab", b"Q:d"]
    assert sent["output_ids"].shape == (2, len(ids("Q:ab.c")))
    assert not found.finished
    assert found.finish() == []


def test_a_batch_is_joined_in_one_response() -> None:
    sent = []
    for place, text in enumerate(("a", "bcd")):
        found = responses(place=place)
        found.feed(response(text, output_log_probs=np.zeros((1, 1, len(text)), np.float32)))
        sent += found.finish()
    whole = joined(sent)
    assert whole["text_output"].tolist() == [b"a", b"bcd"]
    assert whole["batch_index"].tolist() == [[0], [1]]
    assert whole["output_ids"].tolist() == [[*ids("a"), 0, 0], ids("bcd")]
    assert whole["output_log_probs"].shape == (2, 1, 3)
