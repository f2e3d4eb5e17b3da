"""vLLM host: a process over the double of vLLM, serving token and text requests to two clients."""

from __future__ import annotations

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


def test_priorities_reach_vllm(host: Running) -> None:
    for client in (host.guest(), host.engine):
        ask(client, replace(tokens(ABC), priority=-3))
        assert host.calls("add_request")[-1]["priority"] == -3


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
