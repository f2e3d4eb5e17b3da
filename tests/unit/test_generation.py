"""Generation without IO: items of the engine in, pieces of text, counts and errors out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level

from cog_triton import errors
from cog_triton.engines.base import EngineLimits
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import (
    ERROR,
    LENGTH,
    NO_TOKEN,
    PROMPT,
    STOP,
    StepItem,
    merge,
)
from cog_triton.errors import TritonMalformedEvent, TritonUnavailable, TritonUnknownError
from cog_triton.serving.generate import Generation, TextGenerator
from cog_triton.serving.generation import (
    GenerationRequest,
    GenerationResult,
    TextDecoder,
    TextPiece,
    TokenLogProb,
)
from cog_triton.settings import load_settings
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.infer_stream import Put

TOKENIZER = EngineTokenizer(byte_level())
GONE = "E2105 TritonUnavailable: the engine has gone"


def request(
    max_tokens: int = 50, stops: Sequence[str] = (), *, log_probs: bool = False
) -> GenerationRequest:
    return GenerationRequest(
        engine=EngineRequest(
            input_ids=[1],
            sampling=SamplingParams(max_tokens=max_tokens),
            return_log_probs=log_probs,
        ),
        stops=stops,
    )


def decoder(
    max_tokens: int = 50, stops: Sequence[str] = (), *, log_probs: bool = False
) -> tuple[TextDecoder, GenerationResult]:
    result = GenerationResult()
    return TextDecoder(request(max_tokens, stops, log_probs=log_probs), result, TOKENIZER), result


def items(*texts: str, end: int = 0, width: int = 0) -> list[StepItem]:
    """An item a text, of consecutive offsets, the last with an `end`."""
    found, offset = [], 0
    for place, text in enumerate(texts):
        ids = TOKENIZER.encode(text)
        log_probs = [-float(place + column) for _ in ids for column in range(width)]
        last = end if place == len(texts) - 1 else 0
        found.append(StepItem(1, 0, offset, ids, log_probs, last, None, width))
        offset += len(ids)
    return found


def failed(offset: int = 0, text: str = GONE) -> StepItem:
    return StepItem(1, 0, offset, [], [], ERROR, text)


def test_each_feed_gives_a_piece_with_the_tokens_so_far() -> None:
    decoding, result = decoder()
    first, second, third = items("the ", "quick ", "fox", end=STOP)
    assert decoding.feed([first]) == (TextPiece("the ", (), len(first.ids)), None)
    assert not decoding.ended
    piece, error = decoding.feed([second, third])
    assert (piece and piece.text, error) == ("quick fox", None)
    assert decoding.ended
    total = sum(len(item.ids) for item in (first, second, third))
    assert result.output_token_count == total
    assert [count for _, count in result.arrivals] == [len(first.ids), total - len(first.ids)]
    assert result.time_to_first_token is not None
    assert result.finish_reason == "stop"


@given(st.data())
def test_any_batches_give_the_same_text(data: st.DataObject) -> None:
    text = "größer \U0001f600 the lazy dog"
    ids = TOKENIZER.encode(text)
    made = [StepItem(1, 0, place, [token], []) for place, token in enumerate(ids)]
    made[-1] = made[-1]._replace(end=STOP)
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(made)))
        made = [*merge(made[:cut]), *merge(made[cut:])]
    decoding, result = decoder(stops=["lazy"])
    found = ""
    while made and not decoding.ended:
        count = data.draw(st.integers(1, len(made)))
        piece, error = decoding.feed(made[:count])
        del made[:count]
        assert error is None
        found += piece.text if piece else ""
    assert found == "größer \U0001f600 the "
    assert result.finish_reason == "stop"


def test_end_without_text_is_no_piece() -> None:
    decoding, result = decoder()
    assert decoding.feed([StepItem(1, 0, 0, [], [], STOP)]) == (None, None)
    assert decoding.ended
    assert (result.output_token_count, result.finish_reason) == (0, "stop")
    assert (result.time_to_first_token, result.tokens_per_second) == (None, 0)


@pytest.mark.parametrize(("max_tokens", "reason"), [(4, "length"), (5, "stop")])
def test_reached_max_tokens_is_finish_reason_length(max_tokens: int, reason: str) -> None:
    decoding, result = decoder(max_tokens)
    decoding.feed([StepItem(1, 0, 0, TOKENIZER.encode("abcd"), [], LENGTH)])
    assert result.finish_reason == reason


def test_a_cut_character_is_held_back_and_left_out() -> None:
    ids = TOKENIZER.encode("\U0001f600")
    decoding, _ = decoder()
    assert decoding.feed([StepItem(1, 0, 0, ids[:1], [])]) == (None, None)
    piece, _ = decoding.feed([StepItem(1, 0, 1, [], [], STOP)])
    assert piece is None
    decoding, _ = decoder(stops=["ab"])
    whole = TOKENIZER.encode("\ufffda")
    assert decoding.feed([StepItem(1, 0, 0, [*whole, *ids[:1]], [], LENGTH)])[0] == TextPiece(
        "\ufffda", (), len(whole) + 1
    )


@pytest.mark.parametrize(
    ("texts", "max_tokens", "end"),
    [
        (["a", "END", "b"], 50, 0),
        (["a", "END"], len(TOKENIZER.encode("aEND")), LENGTH),
    ],
)
def test_stop_string_ends_it_before_the_engine(texts: list[str], max_tokens: int, end: int) -> None:
    decoding, result = decoder(max_tokens, ["END"])
    piece, error = decoding.feed(items(*texts, end=end))
    assert (piece and piece.text, error) == ("a", None)
    assert decoding.ended
    assert result.finish_reason == "stop"


def test_error_after_a_stop_string_is_no_error() -> None:
    decoding, result = decoder(stops=["END"])
    made = items("a", "END")
    piece, error = decoding.feed([*made, failed()])
    assert (piece and piece.text, error) == ("a", None)
    assert decoding.ended
    assert result.finish_reason == "stop"


def test_error_comes_with_the_text_before_it() -> None:
    decoding, result = decoder()
    piece, error = decoding.feed([*items("a"), failed(1)])
    assert (piece and piece.text, error) == ("a", GONE)
    assert not decoding.ended
    assert result.finish_reason is None
    assert result.output_token_count == 1


def test_error_of_the_transport_has_no_offset() -> None:
    decoding, _ = decoder()
    decoding.feed(items("abc"))
    assert decoding.feed([failed(0)]) == (None, GONE)


@pytest.mark.parametrize("offset", [0, 2, 4])
@pytest.mark.parametrize(("text", "end"), [("d", 0), ("d", STOP), ("", STOP)])
def test_gap_is_e2105(offset: int, text: str, end: int) -> None:
    decoding, _ = decoder()
    decoding.feed(items("abc"))
    with pytest.raises(TritonUnavailable, match="tokens were lost on their way"):
        decoding.feed([StepItem(1, 0, offset, TOKENIZER.encode(text) if text else [], [], end)])


@pytest.mark.parametrize("width", [1, 3])
def test_log_probs_are_those_of_the_sampled_tokens(width: int) -> None:
    decoding, _ = decoder(log_probs=True)
    piece, _ = decoding.feed(items("ab", "c", end=STOP, width=width))
    a, b, c = TOKENIZER.encode("abc")
    assert piece is not None
    assert piece.log_probs == [TokenLogProb(a, 0), TokenLogProb(b, 0), TokenLogProb(c, -1)]


def test_log_probs_of_tokens_without_text_make_a_piece() -> None:
    decoding, _ = decoder(log_probs=True)
    token = TOKENIZER.encode("\U0001f600")[0]
    piece, _ = decoding.feed([StepItem(1, 0, 0, [token], [-0.5], 0, None, 1)])
    assert piece == TextPiece("", [TokenLogProb(token, -0.5)], 1)


def test_log_probs_nobody_asked_for_are_ignored() -> None:
    decoding, _ = decoder()
    piece, _ = decoding.feed(items("ab", end=STOP, width=2))
    assert piece == TextPiece("ab", (), 2)


def prompt_decoder(top: int = 0) -> TextDecoder:
    made = EngineRequest(
        input_ids=[5, 6, 7],
        sampling=SamplingParams(max_tokens=9),
        return_log_probs=True,
        top_log_probs=top,
        prompt_log_probs=True,
    )
    return TextDecoder(GenerationRequest(engine=made), GenerationResult(), TOKENIZER)


def of_prompt(offset: int, ids: list[int], width: int = 1) -> StepItem:
    log_probs = [-float(token) for token in ids for _ in range(width)]
    others = [token + place for token in ids for place in range(width - 1)]
    return StepItem(1, PROMPT, offset, ids, log_probs, 0, None, width, others)


def test_those_of_the_prompt_come_once_and_whole() -> None:
    decoding = prompt_decoder()
    assert decoding.feed([of_prompt(0, [5, 6])]) == (None, None)
    piece, _ = decoding.feed([of_prompt(2, [7]), *items("a", width=1)])
    assert piece is not None
    assert (piece.text, piece.tokens) == ("a", 1)
    assert piece.prompt == [TokenLogProb(6, -6.0), TokenLogProb(7, -7.0)]
    piece, _ = decoding.feed([StepItem(1, 0, 1, TOKENIZER.encode("b"), [-1.0], STOP, None, 1)])
    assert piece is not None
    assert piece.prompt == ()


def test_lost_tokens_of_the_prompt_are_e2105() -> None:
    decoding = prompt_decoder()
    with pytest.raises(TritonUnavailable, match="lost"):
        decoding.feed([of_prompt(1, [6, 7])])
    decoding = prompt_decoder()
    decoding.feed([of_prompt(0, [5])])
    with pytest.raises(TritonUnavailable, match="lost"):
        decoding.feed(items("a", width=1))


def test_the_likeliest_tokens_are_told_and_gaps_among_them_left_out() -> None:
    decoding = prompt_decoder(top=2)
    decoding.feed([of_prompt(0, [5, 6, 7], width=3)])
    token = TOKENIZER.encode("a")[0]
    item = StepItem(1, 0, 0, [token], [-1.0, -1.0, -9e9], STOP, None, 3, [token, NO_TOKEN])
    piece, _ = decoding.feed([item])
    assert piece is not None
    assert piece.log_probs == [TokenLogProb(token, -1.0, [(token, -1.0)])]


def test_missing_log_probs_are_e2104() -> None:
    decoding, _ = decoder(log_probs=True)
    with pytest.raises(TritonMalformedEvent, match="0 log probabilities for 2 tokens"):
        decoding.feed(items("ab"))


class FakeTransport:
    """Token transport of which the test is the other side."""

    last_token_at = 0.0
    replica = 0

    def __init__(self) -> None:
        self.cancelled = 0

    async def open(self, generations: Mapping[int, int]) -> None: ...
    async def disconnect(self) -> None: ...

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> FakeTransport:
        self.request, self.engine_inputs, self.put = request, engine_inputs, put
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def driven(
    engine_inputs: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[Generation, list[StepItem | None], FakeTransport]:
    transport, inbox = FakeTransport(), list[StepItem | None]()
    limits = EngineLimits(
        max_input_len=90, max_seq_len=100, max_batch_size=1, end_id=None, pad_id=None
    )
    generator = TextGenerator(
        load_settings(),
        limits,
        TOKENIZER,
        transport,
        lambda text: errors.from_text(text) or TritonUnknownError(text),
    )
    asked = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=50), **fields)
    made = generator.plan(asked, engine_inputs=engine_inputs or {})
    return Generation(generator, made, inbox.append), inbox, transport


def taken(inbox: list[StepItem | None]) -> list[StepItem]:
    items = [item for item in inbox if item is not None]
    inbox.clear()
    return items


def test_text_that_came_with_an_error_is_given_before_it() -> None:
    generation, inbox, transport = driven()
    with generation:
        transport.put(items("a")[0])
        transport.put(failed())
        piece = generation.advance(taken(inbox))
        assert piece is not None
        assert piece.text == "a"
        assert not generation.ended
        with pytest.raises(TritonUnavailable, match="the engine has gone"):
            generation.advance(taken(inbox))
    assert transport.cancelled == 0, "the engine had ended"


def test_engine_inputs_reach_the_transport() -> None:
    generation, _, transport = driven(engine_inputs={"tps": 3}, guide=Guide("regex", "a"))
    with generation:
        assert transport.engine_inputs == {"tps": 3}
        assert transport.request.guide == Guide("regex", "a")


@pytest.mark.parametrize(
    ("error", "cancelled"),
    [(GeneratorExit, True), (asyncio.CancelledError, True), (KeyError, False)],
)
def test_leaving_it_early_cancels_the_engine(error: type[BaseException], cancelled: bool) -> None:
    generation, inbox, transport = driven()

    def leave() -> None:
        with generation:
            transport.put(items("a")[0])
            generation.advance(taken(inbox))
            raise error

    with pytest.raises(error):
        leave()
    assert transport.cancelled == 1
    assert generation.result.cancelled is cancelled
    assert generation.result.duration > 0


def test_an_engine_that_has_ended_is_not_cancelled() -> None:
    generation, inbox, transport = driven()
    with generation:
        transport.put(items("a", end=STOP)[0])
        generation.advance(taken(inbox))
        assert generation.ended
    assert transport.cancelled == 0
    assert not generation.result.cancelled
