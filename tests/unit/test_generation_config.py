"""Defaults of sampling from a model's generation_config.json, in each API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai_server import THREE, USER, api
from vllm_engines import vllm_engine

from cog_triton.engines.registry import open_engine
from cog_triton.serving import runtime
from cog_triton.serving.prediction_inputs import PredictionInputs
from cog_triton.serving.predictions import Predictions
from cog_triton.settings import load_settings
from cog_triton.text.generation_config import FILE, load, sampling_defaults

MODEL = {"temperature": 0.25, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.25}


def test_what_is_known_of_sampling_is_taken() -> None:
    found = {**MODEL, "min_p": 0.125, "eos_token_id": 3, "do_sample": False, "typical_p": 0.9}
    assert sampling_defaults(found, {"min_p"}) == {**MODEL, "min_p": 0.125}
    assert sampling_defaults({"temperature": None, "top_k": -1}, set()) == {"top_k": 0}
    assert sampling_defaults({"min_p": 0}, set()) == {"min_p": 0}


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


class Engine:
    """What predictions know of their runtime here."""

    sampling_defaults = {**MODEL, "min_p": 0.125}


def test_predictions_have_them_before_those_that_cog_declares() -> None:
    predictions = Predictions.__new__(Predictions)
    predictions._runtime = Engine()  # type: ignore[assignment]
    given = PredictionInputs(**predictions._with_defaults({"prompt": "Hi", "top_p": 0.75}))
    sampling = given.sampling(Engine.sampling_defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.75, 20)
    assert (sampling.repetition_penalty, sampling.min_p) == (1.25, 0.125)
    plain = PredictionInputs(prompt="Hi").sampling()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (0.7, 0.95, 0, 0)


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
