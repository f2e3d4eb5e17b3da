"""vLLM host: a process over the double of vLLM, serving token and text requests to two clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import EOS, MAX_MODEL_LEN, calls
from vllm_hosts import (
    ABC,
    HANDLES,
    PATIENCE_S,
    Inbox,
    Running,
    ask,
    failure,
    over_double,
    running,
    text,
    token_ids,
    tokens,
)

from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.vllm.host_messages import (
    TextEvent,
)
from cog_triton.engines.vllm.sampling_arguments import from_engine_request
from cog_triton.errors import CogTritonError, InvalidArgument, PromptTooLong, VLLMUnknownError
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One host for all tests that do not end it."""
    with over_double(tmp_path_factory.mktemp("host")) as started:
        yield started


def test_tokens_stream_as_they_are_generated(host: Running) -> None:
    counts = []
    for _ in range(10):  # a reader that is late has its tokens merged
        events = ask(host.engine, tokens(ABC))
        assert token_ids(events) == list(b"abcab")
        assert events[-1].finish == "length"
        counts.append(len(events))
    assert max(counts) > 2


def test_without_streaming_tokens_arrive_in_one_event(host: Running) -> None:
    (event,) = ask(host.engine, tokens(ABC, streaming=False))
    assert (event.token_ids, event.finish) == (list(b"abcab"), "length")


@pytest.mark.parametrize("streaming", [True, False])
def test_the_end_token_ends_the_output_and_is_cut(host: Running, streaming: bool) -> None:
    request = tokens([97, 98, EOS, 99], 50, streaming=streaming)
    events = ask(host.engine, request)
    assert (token_ids(events), events[-1].finish) == (list(b"ab"), "stop")
    events = ask(host.engine, replace(request, end_id=98))
    assert (token_ids(events), events[-1].finish) == (list(b"a"), "stop")
    events = ask(host.engine, replace(request, end_id=-1))
    assert len(token_ids(events)) == 50


@pytest.mark.parametrize("streaming", [True, False])
def test_stop_words_are_cut_and_abort_the_request(host: Running, streaming: bool) -> None:
    aborted = len(calls(host.journal, "abort"))
    request = tokens(ABC, 100, streaming=streaming, stop_words=((99, 97, 98), (1, 2)))
    events = ask(host.engine, request)
    assert (token_ids(events), events[-1].finish) == (list(b"ab"), "stop")
    if streaming:
        host.calls("abort", aborted + 1)


def test_bad_words_are_not_generated(host: Running) -> None:
    assert token_ids(ask(host.engine, tokens(ABC, bad_words=((98, 99),)))) == list(b"abdab")


def test_log_probs_are_those_of_the_chosen_tokens(host: Running) -> None:
    events = ask(host.engine, tokens(ABC, 3, return_log_probs=True))
    assert [p for event in events for p in event.log_probs] == [-0.125, -0.25, -0.375]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}),
        ({"temperature": 0.5, "top_p": 0.9, "seed": 3}, {"temperature": 0.5, "top_p": 0.9}),
        ({"top_k": 40, "seed": 7}, {"temperature": 1.0, "top_p": 1.0, "top_k": 40, "seed": 7}),
        ({"top_k": 1, "temperature": 0.7}, {"temperature": 0.0}),
        ({"top_p": 0.5, "seed": 2**64 - 1}, {"seed": 2**63 - 1}),
        ({"top_p": 0.5, "min_tokens": 2}, {"min_tokens": 2, "max_tokens": 5}),
    ],
)
def test_sampling_values_reach_vllm(
    host: Running, sampling: dict[str, Any], expected: dict[str, Any]
) -> None:
    ask(host.engine, tokens(ABC, **sampling))
    params = host.calls("add_request")[-1]["params"]
    assert {name: params[name] for name in expected} == expected
    assert params["detokenize"] is False


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (tokens([1] * MAX_MODEL_LEN, 1), PromptTooLong, "Prompt length"),
        (tokens(ABC, MAX_MODEL_LEN), PromptTooLong, "request_output_len"),
        (tokens([]), InvalidArgument, "input_ids: empty"),
        (tokens(ABC, temperature=3.0, top_p=0.5), InvalidArgument, "temperature must be in"),
        (tokens(ABC, presence_penalty=3.0), InvalidArgument, "presence_penalty must be in"),
        (text("x" * 200), PromptTooLong, "maximum"),
        (text("x" * MAX_MODEL_LEN), PromptTooLong, "longer than the maximum model length"),
        (text("a", {"temperature": -1}), InvalidArgument, "temperature must be in"),
        (text("a", {"n": 0}), InvalidArgument, "n must be at least 1"),
        (text("a", {"n": 2, "temperature": 0}), InvalidArgument, "n must be 1"),
        (text("a", {"structured_outputs": {}}), InvalidArgument, "one kind of structured"),
        (text("a", {"lora_name": "x"}), InvalidArgument, "LoRA feature is not enabled."),
        (text("break the request"), VLLMUnknownError, "RuntimeError: CUDA error: it broke"),
        (tokens(ABC, bad_words=((1,),) * 129), InvalidArgument, "bad_words: 129 words; must be at"),
        (
            tokens(ABC, bad_words=((1,) * 1025,)),
            InvalidArgument,
            "bad_words: 1025 tokens in all; must be at most 1024 on this engine",
        ),
        (tokens(ABC, bad_words=((1, 257),)), InvalidArgument, "bad_words: holds token 257; must"),
        (text("a", {"bad_words": ["b" * 1025]}), InvalidArgument, "bad_words: 1025 tokens"),
        (text("a", {"bad_words": ["b"] * 129}), InvalidArgument, "bad_words: 129 words"),
        (
            text("a", {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}),
            InvalidArgument,
            "logit_bias: 1025 tokens; must be at most 1024",
        ),
        (
            text("a", {"allowed_token_ids": [1] * 1025}),
            InvalidArgument,
            "allowed_token_ids: 1025; must be at most 1024",
        ),
        (
            text("a", {"min_tokens": 1, "stop_token_ids": list(range(128))}),
            InvalidArgument,
            "min_tokens with 128 stop_token_ids; must be at most 112",
        ),
    ],
)
def test_unservable_requests_get_a_coded_error(
    host: Running, request_: Any, error: type[CogTritonError], words: str
) -> None:
    raised = failure(host.engine, request_)
    assert type(raised) is error
    assert words in raised.detail
    assert token_ids(ask(host.engine, tokens(ABC, 1))) == [97], "the engine serves on"


def test_words_are_avoided_and_several_answers_come(host: Running) -> None:
    words = ((98, 99),) * 128
    assert token_ids(ask(host.engine, tokens(ABC, bad_words=words))) == list(b"abdab")
    (event,) = ask(host.guest(), text("abc", {"n": 2, "max_tokens": 4, "bad_words": ["x"]}))
    assert event.texts == ["abca", "bcab"]


def test_text_request_gets_text(host: Running) -> None:
    (event,) = ask(host.guest(), text("one two ", {"max_tokens": 11}))
    assert isinstance(event, TextEvent)
    assert event.texts == ["one two one"]
    assert event.finish_reasons == ["length"]
    assert (event.input_token_count, event.output_token_counts) == (8, [11])
    assert event.logprobs == ["null"]


def test_streamed_text_has_whole_characters(host: Running) -> None:
    events = ask(host.guest(), text("größer ", {"max_tokens": 18}, stream=True))
    assert "".join(event.texts[0] for event in events) == "größer größer "
    assert all("\ufffd" not in event.texts[0] for event in events)
    assert sum(event.output_token_counts[0] for event in events) == 18
    *others, last = [event.finish_reasons[0] for event in events]
    assert last == "length"
    assert set(others) <= {None}


def test_text_events_that_queue_up_are_coalesced(host: Running) -> None:
    parameters = {"n": 2, "max_tokens": 40, "logprobs": 1}
    asked = {"return_logprobs": True, "return_cumulative_logprob": True}
    (whole,) = ask(host.guest(), text("größer ", parameters, **asked))
    behind, slow = threading.Event(), Inbox()

    def emit(event: Any) -> None:
        slow(event)
        assert behind.wait(PATIENCE_S)

    host.guest().submit(1, text("größer ", parameters, stream=True, **asked), emit)
    ask(host.guest(), text("ab", {"max_tokens": 80}))  # which takes twice as long
    behind.set()
    first, rest = slow.until_end()
    assert (first.finish, first.finish_reasons) == (None, [None, None])
    assert [a + b for a, b in zip(first.texts, rest.texts, strict=True)] == whole.texts
    counts = zip(first.output_token_counts, rest.output_token_counts, strict=True)
    assert [a + b for a, b in counts] == whole.output_token_counts == [40, 40]
    found = zip(first.logprobs, rest.logprobs, strict=True)
    assert [json.loads(a) + json.loads(b) for a, b in found] == list(
        map(json.loads, whole.logprobs)
    )
    assert rest.cumulative_logprobs == whole.cumulative_logprobs
    assert rest.finish_reasons == whole.finish_reasons == ["length", "length"]
    assert rest.input_token_count == whole.input_token_count


def test_several_outputs_keep_their_indexes(host: Running) -> None:
    parameters = {"n": 3, "max_tokens": 4}
    (whole,) = ask(host.guest(), text("abc", parameters))
    assert whole.texts == ["abca", "bcab", "cabc"]
    events = ask(host.guest(), text("abc", parameters, stream=True))
    assert ["".join(event.texts[i] for event in events) for i in range(3)] == whole.texts


def test_log_probs_of_text_requests(host: Running) -> None:
    request = text("ab", {"max_tokens": 2, "logprobs": 1}, return_logprobs=True)
    (event,) = ask(host.guest(), request)
    expected = '[{"97": {"logprob": -0.125, "rank": 1, "decoded_token": "a"}}, {"98": '
    assert event.logprobs[0].startswith(expected)
    assert event.cumulative_logprobs == [-0.375]
    asked = text("ab", {"max_tokens": 2}, return_cumulative_logprob=True, return_logprobs=True)
    (event,) = ask(host.guest(), asked)
    assert event.cumulative_logprobs == [-0.375]
    assert event.logprobs == ["null"], "nobody asked vLLM for them"


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (Guide("json_schema", "{}"), {"json": "{}"}),
        (Guide("regex", "a+"), {"regex": "a+"}),
        (Guide("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Guide("structural_tag", "{}"), {"structural_tag": "{}"}),
        (Guide("native_tag", "{}"), {"structural_tag": "{}"}),
    ],
)
def test_guides_and_biases_are_sampling_params(guide: Guide, expected: dict[str, str]) -> None:
    sampling = SamplingParams(
        max_tokens=3, top_p=0.5, min_p=0.25, logit_bias={7: 2.0}, allowed_token_ids=(7, 8)
    )
    request = EngineRequest(input_ids=ABC, sampling=sampling, guide=guide)
    values = from_engine_request(request)
    assert values["structured_outputs"] == expected
    assert (values["min_p"], values["logit_bias"]) == (0.25, {7: 2.0})
    assert values["allowed_token_ids"] == [7, 8]
    plain = from_engine_request(tokens(ABC, 3))
    assert "structured_outputs" not in plain
    assert not {"logit_bias", "allowed_token_ids"} & plain.keys()


def test_biases_of_a_client_reach_vllm_by_token_id(host: Running) -> None:
    """JSON, in which they cross, has text for keys."""
    ask(host.guest(), text("a", {"logit_bias": {"7": 2}}))
    assert host.calls("add_request")[-1]["params"]["logit_bias"] == {"7": 2.0}
    assert "out of range" in failure(host.guest(), text("a", {"logit_bias": {"99999": 1}})).detail


def test_priorities_reach_vllm(host: Running) -> None:
    for client in (host.guest(), host.engine):
        ask(client, replace(tokens(ABC), priority=-3))
        assert host.calls("add_request")[-1]["priority"] == -3


def test_structured_outputs_reach_vllm(host: Running) -> None:
    request = text("hi", {"structured_outputs": '{"choice": ["yes", "no"]}'})
    (event,) = ask(host.guest(), request)
    assert event.texts == ["yes"]
    assert event.finish_reasons == ["stop"]


@pytest.mark.parametrize("request_", [tokens(ABC, 99), text("abc", {"max_tokens": 99})])
@pytest.mark.parametrize("stream", [True, False])
def test_cancel_aborts_the_request_in_vllm(
    request_: Any,
    stream: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vllm_environment: None,
) -> None:
    monkeypatch.setenv("VLLM_DOUBLE_DELAY", "0.5")
    name = "streaming" if isinstance(request_, EngineRequest) else "stream"
    with running(tmp_path) as host:
        inbox = Inbox()
        handle = next(HANDLES)
        host.engine.submit(handle, replace(request_, **{name: stream}), inbox)
        (called,) = host.calls("add_request")
        host.engine.cancel(handle)
        host.engine.cancel(12345)
        assert inbox.until_end()[-1].finish == "cancelled"
        aborted = host.calls("abort")[0]
        assert (aborted["ids"], aborted["internal"]) == ([called["id"]], False)
        assert host.engine.stats().active == 0


@pytest.mark.usefixtures("vllm_environment")
def test_stats_have_the_kv_cache_and_its_prefix_hits(tmp_path: Path) -> None:
    with running(tmp_path, max_model_len=100_000) as host:
        until_stats(host, KVCacheStats(0, 16, 1024, 0, 0))
        for _ in range(2):
            ask(host.engine, tokens(list(b"the same 16 bytes, and some more"), 4))
        until_stats(host, KVCacheStats(0, 16, 1024, 64, 32))
        inbox = Inbox()
        host.engine.submit(handle := next(HANDLES), tokens(ABC, 90_000), inbox)
        until_stats(host, KVCacheStats(1 / 1024, 16, 1024, 67, 32))
        host.engine.cancel(handle)
        until_stats(host, KVCacheStats(0, 16, 1024, 67, 32))


def until_stats(host: Running, wanted: KVCacheStats) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := host.engine.stats().kv_cache) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
