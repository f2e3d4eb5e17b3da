"""Text generation from token ids: limits, streaming, stopping, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from generated_text import Texts
from hypothesis import given
from hypothesis import strategies as st
from loop_thread import call
from scripted_server import HANG, PATIENCE_S, RESET, wait_until
from scripted_triton import Answer, ScriptedTriton, event, to_error
from small_tokenizers import byte_level

from cog_triton import errors
from cog_triton.engines.base import EngineLimits
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import PromptTooLong, TritonUnavailable
from cog_triton.serving.admission import Admission
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.tenants import Tenant
from cog_triton.settings import Settings, load_settings
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.stop_strings import TextStream
from cog_triton.text.tokenizer import EngineTokenizer

TOKENIZER = EngineTokenizer(byte_level())


def limits(max_input_len: int = 90, max_seq_len: int = 100) -> EngineLimits:
    return EngineLimits(
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_batch_size=4,
        end_id=None,
        pad_id=7,
    )


IDLE = ScriptedTriton([]).transport()
"""Planning asks nobody."""


@contextmanager
def generating(
    answer: Answer, settings: Settings | None = None
) -> Iterator[tuple[TextGenerator, ScriptedTriton]]:
    """A generator whose Triton answers as told."""
    with ScriptedTriton(answer) as server, server.connected() as transport:
        yield (
            TextGenerator(settings or load_settings(), limits(), TOKENIZER, transport, to_error),
            server,
        )


def asked(ids: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(input_ids=ids, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(("tenant", "priority"), [(None, -10), (Tenant(name="a", priority=2), 2)])
def test_the_engines_scheduler_is_told_priorities_within_bounds(
    tenant: Tenant | None, priority: int
) -> None:
    for heeds in (True, False):
        generator = TextGenerator(
            load_settings(), limits(), TOKENIZER, IDLE, to_error, priorities=heeds
        )
        planned = generator.plan(asked([1], max_tokens=1), asked_priority=-99, tenant=tenant)
        assert planned.engine.priority == (priority if heeds else 0)
        queued = Texts(generator, planned).generation.ticket
        assert (queued.tenant, queued.priority) == (tenant, 0 if tenant is None else 2)


def started(generator: TextGenerator, stops: Sequence[str] = ()) -> Texts:
    """Texts of at most 50 tokens; the request is sent on its first read."""
    return Texts(generator, generator.plan(asked([1], max_tokens=50), stops))


def plan(
    engine: EngineLimits, prompt: int, sampling: SamplingParams, own: int = 0
) -> GenerationRequest:
    settings = load_settings(max_sequence_length=own or None)
    return TextGenerator(settings, engine, TOKENIZER, IDLE, to_error).plan(
        EngineRequest(input_ids=[1] * prompt, sampling=sampling)
    )


LENGTHS = st.integers(1, 64)


@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS, LENGTHS, st.sampled_from([0, 5, 40, 10**6]))
def test_plan_fits_the_limits_and_clamps_only_when_needed(
    max_input: int, max_seq: int, prompt: int, max_tokens: int, min_tokens: int, own: int
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    limit = min(max_seq, own or max_seq)
    if prompt > max_input or prompt >= limit:
        with pytest.raises(PromptTooLong) as caught:
            plan(limits(max_input, max_seq), prompt, sampling, own)
        assert caught.value.detail == (
            f"Prompt length ({prompt}) exceeds maximum input length ({min(max_input, limit - 1)})"
        )
        return
    generation = plan(limits(max_input, max_seq), prompt, sampling, own)
    assert prompt + generation.engine.sampling.max_tokens <= limit
    assert generation.engine.sampling.max_tokens == min(max_tokens, limit - prompt)
    assert generation.engine.sampling.min_tokens == min(sampling.min_tokens, limit - prompt)
    assert bool(generation.notes) is (max_tokens > limit - prompt)


def tokens(*texts: str) -> list[bytes]:
    """One event for each text, with the ids it encodes to."""
    return [event(output_ids=TOKENIZER.encode(text)) for text in texts]


def text_of(
    events: Sequence[bytes],
    *,
    stops: Sequence[str] = (),
    settings: Settings | None = None,
    **sampling: Any,
) -> tuple[list[str], GenerationResult, Any]:
    """The chunks of a whole generation, what became of it, and the request Triton got."""
    with generating(events, settings) as (generator, server):
        sampling = {"max_tokens": 50, **sampling}
        texts = Texts(generator, generator.plan(asked([1, 2], **sampling), stops))
        chunks = list(texts)
    return chunks, texts.generation.result, server.requests[0].values


def test_stop_string_stops_the_engine() -> None:
    answer = [*tokens("a", "END", "b"), HANG]
    with generating(answer) as (generator, server):
        texts = started(generator, ["END"])
        assert list(texts) == ["a"]
        assert server.request().left.wait(PATIENCE_S)
    assert len(server.requests) == 1
    assert texts.generation.result.finish_reason == "stop"


def test_closing_the_stream_stops_the_engine() -> None:
    answer = [*tokens("a"), HANG]
    with generating(answer) as (generator, server):
        texts = started(generator)
        assert next(texts) == "a"
        assert not server.request().left.is_set()
        texts.close()
        assert server.request().left.wait(PATIENCE_S)
    assert len(server.requests) == 1
    assert texts.generation.result.duration > 0
    assert texts.generation.result.output_token_count == len(TOKENIZER.encode("a"))
    assert texts.generation.result.finish_reason is None
    assert texts.generation.result.cancelled


def test_request_is_sent_only_after_admission() -> None:
    with ThreadPoolExecutor() as pool, generating([HANG]) as (generator, server):
        generator.admission = Admission(1, 1)
        first, second, third = (started(generator) for _ in "123")
        reading = [pool.submit(list, first)]
        server.request()
        reading.append(pool.submit(list, second))
        wait_until(lambda: generator.admission.waiting == 1)
        with pytest.raises(errors.Overloaded, match="1 predictions run and 1 wait"):
            next(third)
        assert len(server.requests) == 1
        assert second.generation.result.queue_time is None
        call(second.generation.ticket.cancel)
        error = reading[1].exception(PATIENCE_S)
        assert isinstance(error, TritonUnavailable)
        assert "cancelled while it waited for its turn" in str(error)
        assert len(server.requests) == 1
        call(first.generation.ticket.cancel)
        assert isinstance(reading[0].exception(PATIENCE_S), TritonUnavailable)
        assert first.generation.result.queue_time == 0


@pytest.mark.parametrize(
    ("answer", "failures"),
    [
        (tokens("a"), 0),
        ([event(error="E1005 InvalidArgument: no")], 0),
        ([event(error="CUDA error")], 1),
        ([RESET], 1),
    ],
    ids=["text", "user error", "engine error", "broken"],
)
def test_engine_failure_calls_on_failure(answer: Answer, failures: int) -> None:
    failed = []
    with generating(answer) as (generator, server):
        generator.on_failure = lambda: failed.append(1)
        with suppress(errors.CogTritonError):
            list(started(generator))
    assert len(failed) == failures
    assert len(server.requests) == 1


def test_min_tokens_may_be_reached_within_one_read() -> None:
    ids = TOKENIZER.encode("STOPxSTOPy")
    for first in range(len(ids) + 1):
        text = TextStream(TOKENIZER, ["STOP"], min_tokens=len(TOKENIZER.encode("STOPx")))
        assert text.feed(ids[:first]) + text.feed(ids[first:]) + text.finish() == "STOPx"
        assert text.stopped
