"""Generations: items of the engine in, text out; their inbox; defaults of a model."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import THREE, USER, api
from small_front import on_loop
from small_tokenizers import byte_level
from vllm_engines import vllm_engine

from cog_triton import errors
from cog_triton.engines.base import EngineLimits
from cog_triton.engines.registry import open_engine
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
from cog_triton.errors import TritonUnavailable, TritonUnknownError
from cog_triton.serving import runtime
from cog_triton.serving.generate import Generation, TextGenerator
from cog_triton.serving.generation import (
    GenerationRequest,
    GenerationResult,
    TextDecoder,
    TokenLogProb,
)
from cog_triton.serving.inbox import Inbox
from cog_triton.settings import load_settings
from cog_triton.text.generation_config import FILE, load, sampling_defaults
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


@pytest.mark.parametrize(("max_tokens", "reason"), [(4, "length"), (5, "stop")])
def test_reached_max_tokens_is_finish_reason_length(max_tokens: int, reason: str) -> None:
    decoding, result = decoder(max_tokens)
    decoding.feed([StepItem(1, 0, 0, TOKENIZER.encode("abcd"), [], LENGTH)])
    assert result.finish_reason == reason


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


def test_error_comes_with_the_text_before_it() -> None:
    decoding, result = decoder()
    piece, error = decoding.feed([*items("a"), failed(1)])
    assert (piece and piece.text, error) == ("a", GONE)
    assert not decoding.ended
    assert result.finish_reason is None
    assert result.output_token_count == 1


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


def item(offset: int = 0) -> StepItem:
    return StepItem(1, 0, offset, [1], [])


def offsets(items: list[StepItem] | None) -> list[int]:
    return [one.offset for one in items or ()]


@on_loop
async def test_all_that_has_come_is_read_at_once_and_in_order() -> None:
    inbox, turns = Inbox(), 0
    reading = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    for offset in range(99):
        inbox.put(item(offset))
        inbox.put(None)
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert offsets(reading.result()) == list(range(99))
    assert turns < 5


@on_loop
async def test_it_waits_no_longer_than_the_timeout() -> None:
    inbox = Inbox()
    assert await inbox.take(0) is None
    assert await inbox.take(0.01) is None
    inbox.put(item(1))
    assert await inbox.take(0) == [item(1)]
    inbox.put(None)
    assert await inbox.take(60) == []


@on_loop
async def test_what_comes_is_handled_without_waking_the_task() -> None:
    inbox = Inbox()
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")
    found: list[list[StepItem]] = []

    def arrived() -> bool:
        assert name.get() == "a task's"
        found.append(inbox.take_now())
        return found[-1][-1].offset < 3

    async def wait() -> None:
        name.set("a task's")
        await inbox.handle(arrived)

    inbox.put(item(0))
    waiting = asyncio.ensure_future(wait())
    for offset in range(1, 4):
        await asyncio.sleep(0.01)
        assert [one[0].offset for one in found] == list(range(offset))
        assert not waiting.done()
        inbox.put(item(offset))
    await asyncio.wait_for(waiting, 60)
    inbox.put(item(4))
    assert await inbox.take() == [item(4)], "it is handled no more"
    assert len(found) == 4


MODEL = {"temperature": 0.25, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.25}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
        ({"temperature": True}, "temperature=True: must be a number"),
        ({"temperature": -1}, "temperature=-1: must not be negative"),
        ({"temperature": float("nan")}, "temperature=nan: must be a finite number"),
        ({"top_p": 7}, "top_p=7: must be from 0 to 1"),
        ({"top_k": 2.5}, "top_k=2.5: must be a whole number"),
        ({"top_k": [1] * 10**6}, "top_k=[1, 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be greater than 0"),
        ({"min_p": 0.1}, "min_p=0.1: this engine does not support it"),
    ],
)
def test_a_bad_value_is_named_and_ignored(
    found: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert sampling_defaults({"top_p": 0.5, **found}, set()) == (
        {} if "top_p" in found else {"top_p": 0.5}
    )
    (record,) = caplog.records
    assert words in record.getMessage()
    assert record.getMessage().endswith("it is ignored")


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, b"\xff".decode("latin-1")])
def test_a_broken_file_is_named_and_ignored(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(tmp_path) == {}
    assert not caplog.records
    (tmp_path / FILE).write_text(text, "latin-1")
    assert load(tmp_path) == {}
    assert str(tmp_path / FILE) in caplog.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 9}),
    ],
)
def test_requests_have_the_models_defaults_unless_they_say_otherwise(
    path: str, body: dict[str, Any]
) -> None:
    names = ("temperature", "runtime_top_p", "runtime_top_k", "repetition_penalty")
    with api(THREE, defaults=MODEL) as served:
        body = {"model": "small", **body}
        answer = served.post(path, body).json()
        served.post(path, {**body, "temperature": 0.75, "top_k": 0})
        first, second = ([r.values[name] for name in names] for r in served.triton.requests)
    assert first == list(MODEL.values())
    assert second == [0.75, 0.5, 0, 1.25]
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)


def test_the_setting_and_model_json_choose(tmp_path: Path) -> None:
    model, other = tmp_path / "engine", tmp_path / "other"
    other.mkdir()
    vllm_engine(model)
    (model / FILE).write_text(json.dumps(MODEL))
    (other / FILE).write_text('{"top_k": 5}')

    def found(setting: str = "", **arguments: Any) -> dict[str, float]:
        (model / "model.json").write_text(json.dumps(arguments))
        settings = load_settings(generation_config=setting)
        return dict(runtime._sampling_defaults(settings, open_engine(model)))

    assert found() == found("auto") == MODEL
    assert found("none") == {}
    assert found(generation_config="vllm") == {}
    assert found(generation_config="../other") == {"top_k": 5}
    override = {"top_k": 7, "max_new_tokens": 3}
    assert found(override_generation_config=override) == {**MODEL, "top_k": 7}
    assert found(runner="pooling") == {}
    # Of another model's tokenizer nothing is read.
    (other / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (other / "tokenizer_config.json").write_bytes((model / "tokenizer_config.json").read_bytes())
    assert found(tokenizer="../other") == MODEL
