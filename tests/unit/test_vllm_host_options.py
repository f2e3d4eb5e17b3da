"""vLLM host's options: what engine arguments, the model's parameters and the environment change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import calls, hugging_face, vllm_engine
from vllm_hosts import (
    ABC,
    HANDLES,
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

from cog_triton.errors import EngineIncompatible, Overloaded


@pytest.mark.parametrize(
    ("given", "opened"),
    [
        ({}, {"model": "."}),
        (
            {"model": "weights", "tokenizer": "words"},
            {"model": "./weights", "tokenizer": "./words"},
        ),
        ({"model": "../elsewhere"}, {"model": "{root}/elsewhere"}),
    ],
)
def test_what_lies_in_the_engine_directory_has_a_path_without_it(
    tmp_path: Path, given: dict[str, str], opened: dict[str, str]
) -> None:
    """vLLM's hash of compiled code has the text of the model's path in it."""
    for name in ("engine/weights", "engine/words", "elsewhere"):
        hugging_face(tmp_path / name)
    with over_double(tmp_path, **given) as started:
        (call,) = started.calls("open")
        assert token_ids(ask(started.engine, tokens(ABC))) == list(b"abcab")
    expected = {name: text.format(root=tmp_path) for name, text in opened.items()}
    assert {name: call[name] for name in ("model", "tokenizer") if name in call} == expected


@pytest.mark.usefixtures("vllm_environment")
def test_bad_words_have_no_limit_with_model_runner_v1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with running(tmp_path) as host:
        many = tokens(ABC, bad_words=((98, 99),) * 600)
        assert token_ids(ask(host.engine, many)) == list(b"abdab")


@pytest.mark.usefixtures("vllm_environment")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_num_queued_reqs": 1}, "currently busy and cannot accept new requests"),
        ({"max_num_queued_tokens": 1}, "reached its prefill token backlog limit"),
    ],
)
def test_vllms_own_queue_limits_are_overload(
    limit: dict[str, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DOUBLE_DELAY", "30")
    with running(tmp_path, max_model_len=4096, **limit) as host:
        host.engine.submit(next(HANDLES), tokens(ABC, 4000), Inbox())
        host.calls("add_request")
        for request in (tokens(ABC), text("abc")):
            error = failure(host.engine, request)
            assert isinstance(error, Overloaded)
            assert words in error.detail


@pytest.mark.parametrize("asked", ["true", "false"])
@pytest.mark.usefixtures("vllm_environment")
def test_batch_invariance_is_set_where_it_is_asked_for(tmp_path: Path, asked: str) -> None:
    with running(tmp_path, {"deterministic": asked}) as host:
        host.calls("open")
        assert bool(calls(host.journal, "batch_invariant")) is (asked == "true")


@pytest.mark.parametrize("own", [{}, {"reasoning_parser": "own"}])
@pytest.mark.usefixtures("vllm_environment")
def test_the_reasoning_parser_is_the_engines_argument(tmp_path: Path, own: dict[str, Any]) -> None:
    with running(tmp_path, {"reasoning_parser": "qwen3"}, **own) as host:
        (opened,) = host.calls("open")
    assert '"reasoning_parser": "qwen3"' in json.dumps(opened)


@pytest.mark.usefixtures("vllm_environment")
def test_a_version_that_was_never_run_needs_to_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_DOUBLE_VERSION", "0.40.0")
    directory = vllm_engine(tmp_path / "engine")
    with pytest.raises(EngineIncompatible, match=r"vLLM 0\.40\.0: .* COG_TRITON_VLLM_UNTESTED=1"):
        Running(directory)
    assert not calls(tmp_path / "journal", "open")
    host = Running(directory, allow_untested="true")
    try:
        assert token_ids(ask(host.engine, tokens(ABC, 2))) == [97, 98]
    finally:
        host.engine.close()
    assert "COG_TRITON_VLLM_UNTESTED is set, so vLLM 0.40.0 is served" in capfd.readouterr().err


@pytest.mark.usefixtures("vllm_environment")
def test_disable_log_stats_disables_metrics(tmp_path: Path) -> None:
    with running(tmp_path, disable_log_stats=True) as host:
        ask(host.engine, tokens(ABC, 4))
        assert host.engine.stats().kv_cache is None
