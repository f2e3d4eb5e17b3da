"""Check of streams against the mock's text: each kind of wrong stream is told as that."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from _known_text import (
    COMPLETE,
    DISORDERED,
    DOUBLED,
    LOST,
    MISCOUNTED,
    SHORT,
    SURPLUS,
    UNCODED,
    KnownCompletion,
    KnownPrediction,
    KnownStream,
    KnownText,
)

KNOWN = KnownText()
COUNT = 30
"""Tokens of whole characters."""
PIECES = [KNOWN(number + 1)[len(KNOWN(number)) :] for number in range(COUNT)]


def event(values: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(values)}\n\n".encode()


def fed(stream: KnownStream, events: Iterable[bytes], status: int = 200) -> str:
    stream.begin(status, {})
    for data in events:
        stream.body(data, 0)
    return stream.outcome


def prediction(pieces: list[str], count: int) -> list[bytes]:
    outputs = [event({"chunk": text, "index": n}, "output") for n, text in enumerate(pieces)]
    metrics = {"output_token_count": count}
    end = {"status": "succeeded", "metrics": metrics, "output": pieces}
    return [*outputs, event(end, "completed")]


def completion(pieces: list[str], count: int) -> list[bytes]:
    outputs = [event({"choices": [{"text": text}]}) for text in pieces]
    usage = event({"choices": [], "usage": {"completion_tokens": count}})
    return [*outputs, usage, b"data: [DONE]\n\n"]


@pytest.mark.parametrize("count", [1, 90, 300, 267, 268, 269, 5000])
def test_complete_streams(count: int) -> None:
    text = KNOWN(count)
    assert fed(KnownPrediction(KNOWN, count), prediction([text], count)) == COMPLETE
    stream = KnownCompletion(KNOWN, count)
    assert fed(stream, completion([text], count)) == COMPLETE
    assert stream.checked == count


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        ([*PIECES[:14], *PIECES[15:]], LOST),
        ([*PIECES[:14], *PIECES[13:]], DOUBLED),
        ([*PIECES[:14], *PIECES[6:]], DOUBLED),
        ([*PIECES[:14], PIECES[15], PIECES[14], *PIECES[16:]], DISORDERED),
        ([*PIECES[:14], PIECES[5], *PIECES[14:]], DISORDERED),
        ([*PIECES, KNOWN(100)[len(KNOWN(COUNT)) :]], SURPLUS),
        (PIECES[:-3], SHORT),
        ([], SHORT),
    ],
)
@pytest.mark.parametrize(
    ("kind", "events"), [(KnownPrediction, prediction), (KnownCompletion, completion)]
)
def test_wrong_streams(
    kind: type[KnownStream], events: Any, pieces: list[str], outcome: str
) -> None:
    stream = kind(KNOWN, COUNT)
    assert fed(stream, events(pieces, COUNT)) == outcome
    assert stream.checked <= COUNT


def test_a_wrong_text_is_told_even_where_the_stream_ends_in_a_code() -> None:
    wrong = [*PIECES[:14], *PIECES[15:]]
    failed = [*completion(wrong, 0)[:-2], event({"error": {"message": "E2105 x: y"}})]
    assert fed(KnownCompletion(KNOWN, COUNT), failed) == LOST


def test_other_ends() -> None:
    assert fed(KnownCompletion(KNOWN, COUNT), completion(PIECES, COUNT - 1)) == MISCOUNTED
    assert fed(KnownCompletion(KNOWN, COUNT), completion(PIECES, COUNT)[:-2]) == SHORT
    assert fed(KnownPrediction(KNOWN, COUNT), [b"what?"], 500) == UNCODED
    coded = b'{"detail": "E2105 TritonUnavailable: gone"}'
    assert fed(KnownPrediction(KNOWN, COUNT), [coded], 503) == "E2105"
    failed = event({"status": "failed", "error": "E2105 TritonUnavailable: gone"}, "completed")
    assert fed(KnownPrediction(KNOWN, COUNT), [failed]) == "E2105"


def test_pieces_of_a_prediction_are_numbered() -> None:
    told = prediction(PIECES, COUNT)
    swapped = [told[0], told[1].replace(b'"index": 1', b'"index": 2'), *told[2:]]
    assert fed(KnownPrediction(KNOWN, COUNT), swapped) == DISORDERED
