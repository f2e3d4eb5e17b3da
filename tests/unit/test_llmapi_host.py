"""LLM API host over the double of TensorRT-LLM: tokens, stops, seeds, cancellation, errors."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmapi_engines import calls, double_environment, llmapi_engine
from started_engines import StartedEngine

from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import (
    EngineIncompatible,
    InvalidArgument,
    InvalidPredictorConfig,
    PromptTooLong,
    TritonUnknownError,
)
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams

HOST = "cog_triton.engines.llmapi.llmapi_host:LLMAPIHost"
PATIENCE_S = 60


class Running:
    """A host and its owner's connection."""

    def __init__(self, directory: Path, journal: Path) -> None:
        self.journal = journal
        self.engine = StartedEngine(HOST, {"engine_dir": str(directory)})
        self._handle = 0

    def submit(self, request: EngineRequest) -> tuple[int, queue.SimpleQueue[TokenEvent]]:
        self._handle += 1
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.engine.submit(self._handle, request, events.put)
        return self._handle, events

    def generate(self, request: EngineRequest) -> TokenEvent:
        return whole(self.submit(request)[1])


def whole(events: queue.SimpleQueue[TokenEvent]) -> TokenEvent:
    """All events of a request as one."""
    found = [events.get(timeout=PATIENCE_S)]
    while found[-1].finish is None and found[-1].error is None:
        found.append(events.get(timeout=PATIENCE_S))
    return TokenEvent.coalesce(found)


def asked(prompt: bytes, max_tokens: int = 16, **values: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **values)
    return EngineRequest(input_ids=list(prompt), sampling=sampling)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("llmapi")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in double_environment(directory / "journal").items():
            patch.setenv(name, value)
        engine = llmapi_engine(directory / "engine", guided_decoding_backend="xgrammar")
        running = Running(engine, directory / "journal")
        yield running
        running.engine.close()
    assert calls(directory / "journal", "shutdown")


def test_tokens_come_and_the_end_id_does_not(host: Running) -> None:
    event = host.generate(asked(b"abc"))
    assert (bytes(event.token_ids), event.finish) == (b"abc", "stop")
    opened = calls(host.journal, "LLM")[0]
    assert opened["max_seq_len"] == 128
    assert Path(opened["model"]).name == "engine"


def test_max_tokens_ends_with_length(host: Running) -> None:
    event = host.generate(asked(b"abcdef", max_tokens=4))
    assert (bytes(event.token_ids), event.finish) == (b"abcd", "length")


def test_stop_words_are_cut_and_end_the_generation(host: Running) -> None:
    request = replace(asked(b"one, two, three"), stop_words=((ord(","), ord(" "), ord("t")),))
    event = host.generate(request)
    assert (bytes(event.token_ids), event.finish) == (b"one", "stop")
    assert calls(host.journal, "abort")


def test_seed_and_sampling_reach_the_engine(host: Running) -> None:
    host.generate(asked(b"abc", temperature=0.5, top_k=7, top_p=0.9, seed=2**63 + 5))
    params = calls(host.journal, "generate_async")[-1]["params"]
    assert (params["seed"], params["temperature"]) == (5, 0.5)
    assert (params["top_k"], params["top_p"]) == (7, 0.9)
    host.generate(asked(b"abc", temperature=0))
    assert calls(host.journal, "generate_async")[-1]["params"]["top_k"] == 1


def test_end_ids_are_the_request_s_own(host: Running) -> None:
    event = host.generate(replace(asked(b"abc"), end_id=ord("b")))
    assert (bytes(event.token_ids), event.finish) == (b"a", "stop")
    endless = host.generate(replace(asked(b"ab", max_tokens=5), end_id=-1))
    assert (bytes(endless.token_ids), endless.finish) == (b"ababa", "length")


def test_log_probs_come_with_the_tokens(host: Running) -> None:
    event = host.generate(replace(asked(b"abc"), return_log_probs=True))
    assert len(event.log_probs) == 3
    assert event.log_probs[0] == pytest.approx(-0.693, abs=0.001)


def test_guides_and_bad_words_reach_the_engine(host: Running) -> None:
    guided = replace(asked(b"abc"), guide=Guide("json_schema", "{}"), bad_words=((5,), (6,)))
    host.generate(guided)
    params = calls(host.journal, "generate_async")[-1]["params"]
    assert params["guided_decoding"]["json"] == "{}"
    assert params["bad_token_ids"] == [5, 6]


def test_a_cancelled_request_ends_at_once_and_is_aborted(host: Running) -> None:
    before = len(calls(host.journal, "abort"))
    handle, events = host.submit(asked(b"slow " * 16, max_tokens=40))
    first = events.get(timeout=PATIENCE_S)
    assert first.token_ids
    host.engine.cancel(handle)
    assert whole(events).finish == "cancelled"
    deadline = time.monotonic() + PATIENCE_S
    while len(calls(host.journal, "abort")) == before:
        assert time.monotonic() < deadline, "nothing is aborted"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (asked(b"a" * 100, max_tokens=60), PromptTooLong, "128"),
        (asked(b"abc", repetition_penalty=1.3), InvalidArgument, "before 1.3"),
        (replace(asked(b"abc"), bad_words=((1, 2),)), InvalidArgument, "one token"),
        (asked(b"refuse me"), InvalidArgument, "cannot be served"),
        (asked(b"boom"), TritonUnknownError, "it broke"),
    ],
)
def test_errors_have_codes_and_end_their_request_alone(
    host: Running, request_: EngineRequest, error: type[Exception], says: str
) -> None:
    event = host.generate(request_)
    assert type(event.error) is error
    assert says in str(event.error)
    assert bytes(host.generate(asked(b"next")).token_ids) == b"next"


@pytest.mark.parametrize(
    ("arguments", "version", "error", "says"),
    [
        ({"attn_backend": "TRTLLM"}, "1.2.1", InvalidPredictorConfig, "TensorRT-LLM refuses it"),
        ({}, "1.1.0", EngineIncompatible, "from 1.2 on"),
    ],
)
def test_an_engine_that_does_not_load_says_why(
    arguments: dict[str, Any],
    version: str,
    error: type[Exception],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = double_environment(tmp_path / "journal", TRTLLM_DOUBLE_VERSION=version)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=says):
        Running(llmapi_engine(tmp_path / "engine", **arguments), tmp_path / "journal")


def test_without_tensorrt_llm_the_engine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(EngineIncompatible, match="engine_python"):
        Running(llmapi_engine(tmp_path / "engine"), tmp_path / "journal")
