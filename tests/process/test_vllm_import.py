"""Import of requests: what vLLM's EngineCore makes after tokens that it takes as output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import DOUBLES
from vllm_hosts import ABC, Running, ask, failure, over_double, token_ids, tokens

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.vllm import request_import
from cog_triton.engines.vllm.sampling_arguments import MADE, from_client
from cog_triton.errors import InvalidArgument
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams

TOKENS = 80
DRAWS = {"temperature": 0.8, "top_p": 0.95, "seed": 4242}
SCHEMA = Guide(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 8, "maxLength": 20},
                "note": {"type": "string", "minLength": 12, "maxLength": 20},
            },
        }
    ),
)
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.1}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "seed": DRAWS,
    "penalties": {**DRAWS, **PENALTIES},
    "greedy penalties": PENALTIES,
    "min_tokens": {"min_tokens": 40},
    "JSON": {**DRAWS, "guide": SCHEMA},
    "greedy JSON": {"guide": SCHEMA},
    "regex": {**DRAWS, "guide": Guide("regex", r"[a-z]{5,12}( [a-z]{3,9}){3,6}\.")},
}


@contextmanager
def sampling_double(
    directory: Path, variables: Mapping[str, str] | None = None, **more: Any
) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VLLM_DOUBLE_SAMPLES": "1", **(variables or {})}.items():
            patch.setenv(name, value)
        with over_double(directory, **more) as started:
            yield started


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with sampling_double(tmp_path_factory.mktemp("import")) as started:
        yield started


def request(made: tuple[int, ...] = (), prompt: bytes = b"Tell it ", **asked: Any) -> EngineRequest:
    own = {name: asked.pop(name) for name in ("guide", "return_log_probs") if name in asked}
    sampling = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0.0, **asked})
    return EngineRequest(input_ids=list(prompt), sampling=sampling, made=made, **own)


@pytest.mark.parametrize("asked", CLASSES)
def test_what_follows_is_what_would_have_followed(host: Running, asked: str) -> None:
    undisturbed = token_ids(ask(host.engine, request(**CLASSES[asked])))
    assert len(undisturbed) > 20
    if "guide" in CLASSES[asked] and "JSON" in asked:
        assert json.loads(bytes(undisturbed))["note"]
    for cut in (1, 7, len(undisturbed) - 1):
        made = tuple(undisturbed[:cut])
        rest = token_ids(ask(host.engine, request(made, **CLASSES[asked])))
        assert rest == undisturbed[cut:], cut


def test_finish_counts_and_places_of_log_probs_continue(host: Running) -> None:
    whole = ask(host.engine, request(return_log_probs=True))
    for _ in range(2):  # vLLM asserts that what is cached of a request is of its prompt
        rest = ask(host.engine, request(tuple(token_ids(whole)[:50]), return_log_probs=True))
        assert rest[-1].finish == whole[-1].finish == "length"
        values = [value for event in whole for value in event.log_probs]
        assert [value for event in rest for value in event.log_probs] == values[50:]


def test_a_grammar_that_refuses_what_was_made_fails_the_request_alone(host: Running) -> None:
    broken = ask(host.engine, request((ord("7"),), guide=SCHEMA))
    assert broken[-1].error is not None
    assert token_ids(ask(host.engine, request(max_tokens=3)))


def test_a_grammar_gets_what_comes_after_the_reasoning(tmp_path: Path) -> None:
    """Inside it, before its end mark, at it and after it."""
    config = {"reasoning_parser": "made_up"}
    choice, made = Guide("regex", "(yes|no), [a-z]{6,9}"), (*b"I think ~",)
    with sampling_double(tmp_path, structured_outputs_config=config) as host:
        for given in (made[:4], made[:8], made, (*made, *b"yes")):
            asked = request(made=given, guide=choice, prompt=b"Now: ", **DRAWS)
            found = bytes(token_ids(ask(host.engine, asked)))
            if len(given) < len(made):
                assert len(found) > 12 or b"~" in found, "it continues to reason"
            else:
                answer = bytes(given[len(made) :]) + found
                assert answer.startswith((b"yes, ", b"no, ")), answer


@pytest.mark.parametrize(
    ("variables", "more", "reason"),
    [
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, {}, "model runner V1 drops"),
        ({"VLLM_PLUGINS": "other"}, {}, r"has not loaded the plugin .*VLLM_PLUGINS=other"),
        ({}, {"speculative_config": {"method": "ngram_gpu"}}, "with speculative decoding"),
    ],
    ids=["V1", "VLLM_PLUGINS", "speculative"],
)
def test_it_is_refused_by_name_where_it_cannot_be(
    tmp_path: Path, variables: Mapping[str, str], more: Mapping[str, Any], reason: str
) -> None:
    with sampling_double(tmp_path, variables, **more) as host:
        error = failure(host.engine, request((97, 98)))
        assert isinstance(error, InvalidArgument)
        assert re.search(f"made: .*{reason}", error.detail), error.detail
        assert token_ids(ask(host.engine, tokens(ABC))) != []


def test_another_python_has_the_plugin_too(tmp_path: Path) -> None:
    """It is given this package by a link, and none of its metadata."""
    with sampling_double(tmp_path, parameters={"engine_python": sys.executable}) as host:
        made = tuple(token_ids(ask(host.engine, request())))
        assert token_ids(ask(host.engine, request(made[:20]))) == list(made[20:])


def test_clients_must_not_bring_tokens() -> None:
    with pytest.raises(InvalidArgument, match=f"extra_args.{MADE}"):
        from_client({"extra_args": {MADE: [1]}})
    assert from_client({"extra_args": {"mine": 1}})


def test_a_vllm_that_has_changed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOUBLES))
    try:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.request import Request

        assert not hasattr(EngineCore, request_import.PLUGIN)

        def append_output_token_ids(self: Any, token_ids: list[int], where: str) -> None: ...

        monkeypatch.setattr(Request, "append_output_token_ids", append_output_token_ids)
        before = Request.from_engine_core_request
        request_import.install()
        assert "append_output_token_ids takes" in getattr(EngineCore, request_import.PLUGIN)(None)
        assert Request.from_engine_core_request == before
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


def test_the_plugin_is_found_beside_vllm_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for _ in range(2):
        request_import.make_discoverable()
    (found,) = entry_points(group="vllm.general_plugins")
    assert found.name == request_import.PLUGIN
    assert found.load() is request_import.install
