"""Mock family: engine directory, answers, options, request inputs, the rendered repository."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_requests import request
from test_tensor_contract import tensors_of
from tokenizers import Tokenizer

from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.engines import tensor_contract
from cog_triton.engines.base import options_of
from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.mock.mock_request import INPUTS, MockOptions, decode_request
from cog_triton.engines.registry import open_engine
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import EngineCorrupt, InvalidArgument, InvalidPredictorConfig
from cog_triton.sources.source import Source
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.model_repository import max_batch_size, read_config, render_repository
from cog_triton.triton.serve_config import ServeConfig


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mock_directory.make_engine(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def tokenizer(engine: Path) -> EngineTokenizer:
    return EngineTokenizer.load(engine)


def test_the_directory_is_made_once_the_same_everywhere(engine: Path, tmp_path: Path) -> None:
    made = mock_directory.make_engine(tmp_path / "engines")
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert mock_directory.make_engine(tmp_path / "engines") == made
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before
    assert [path.name for path in (tmp_path / "engines").iterdir()] == [engine.name]
    for path in made.iterdir():
        assert (engine / path.name).read_bytes() == path.read_bytes()
    manifest = engine_manifest.load(made)
    assert manifest is not None
    assert engine_tar.differences(manifest, Source.open(str(made)).files(checksums=True)) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"output_ids": []}, None),
        ({"output_ids": [10**6]}, None),
        ({"max_seq_len": "many"}, None),
        ({}, ""),
        ({}, "[]"),
        ({}, "{}"),
    ],
)
def test_an_invalid_mock_json_is_refused(
    change: dict[str, Any], text: str | None, engine: Path, tmp_path: Path
) -> None:
    content = json.loads((engine / "mock.json").read_text())
    (tmp_path / "mock.json").write_text(json.dumps({**content, **change}) if text is None else text)
    with pytest.raises(EngineCorrupt, match=r"mock\.json: not a mock engine"):
        open_engine(tmp_path)


SCRIPT = [
    {"after": "weather", "say": "<tool_call>{}</tool_call>"},
    {"after": "weather\n15", "say": "It is 15 °C."},
    {"after": "Thanks", "say": "You are welcome"},
]


def scripted(directory: Path, script: object = SCRIPT) -> Path:
    path = directory / "answers.json"
    path.write_text(script if isinstance(script, str) else json.dumps(script))
    return mock_directory.make_engine(directory / "engines", path)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("How is the weather?", SCRIPT[0]["say"]),
        ("How is the weather\n15", SCRIPT[1]["say"]),  # of two at one place, the longer
        ("weather\n15 ... Thanks, and of the weather tomorrow?", SCRIPT[0]["say"]),
        ("<|im_start|>user\nweather\n15 Thanks<|im_end|>", SCRIPT[2]["say"]),
    ],
)
def test_the_entry_that_comes_last_answers(tmp_path: Path, prompt: str, answer: str) -> None:
    engine = scripted(tmp_path)
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    mock = MockEngine(mock_directory.read_model(engine), MockOptions(tps=0))

    def rest() -> list[int]:
        events: list[TokenEvent] = []
        while not (events and events[-1].finish):
            events += [event for _, event in mock.step()]
        assert events[-1].finish == "stop"
        return [token for event in events for token in event.token_ids]

    ids = tokenizer.encode(prompt).ids
    whole = replace(request(100, guide=Guide("regex", ".*")), input_ids=ids)
    mock.submit(1, whole)
    said = rest()
    assert tokenizer.decode(said) == answer
    # Taken up after an engine's death: the same answer, although the prompt has grown by it.
    mock.submit(2, replace(whole, made=said[:2]))
    assert rest() == said[2:]


@pytest.mark.parametrize(
    "script", ["nonsense", "{}", [{"after": "a"}], [{"after": "", "say": "b"}], [1]]
)
def test_other_scripts_are_refused(tmp_path: Path, script: object) -> None:
    with pytest.raises(InvalidArgument, match=r"MOCK_ANSWERS=.*answers.json.*must be a list"):
        scripted(tmp_path, script)


ALL = {
    "tps": 33.5,
    "jitter": 0.25,
    "prefill_ms": 0.1,
    "tokens_per_response": 4,
    "join": False,
    "max_batch_size": 8,
    "cancellation_check_period_ms": 50,
}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("tps", -1, "must be a finite number, at least 0"),
        ("jitter", 1.1, "must be a finite number, from 0 to 1"),
        ("tokens_per_response", 0, "must be a whole number, at least 1"),
        ("join", 1, "must be true or false"),
        ("tpss", 1, "the mock engine has no such option; did you mean 'tps'"),
    ],
)
def test_invalid_options_are_refused_by_name(name: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidPredictorConfig) as caught:
        MockOptions.parse({name: value})
    assert f"tensorrt_llm.args.{name}={value!r}: {rule}" in caught.value.detail


def test_rendered_repository_has_the_options_and_extra_inputs(engine: Path, tmp_path: Path) -> None:
    family = MockFamily.open(engine)
    repository = render_repository(family, ServeConfig({"tensorrt_llm": ALL}), tmp_path / "repo")
    assert max_batch_size(repository) == 8
    assert family.defaults == MockOptions.parse(ALL)
    config = read_config(repository / "tensorrt_llm" / "config.pbtxt")
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    assert parameters["engine_dir"] == str(engine)
    assert parameters["coalesce"] == str(family.defaults.join).lower()
    parameters = options_of(parameters)
    assert MockOptions.parse(parameters) == family.defaults
    assert config.model_transaction_policy.decoupled
    own = {item.name: item for item in config.input if item.name in INPUTS}
    assert list(own) == list(INPUTS)
    assert all(item.optional and list(item.dims) == [1] for item in own.values())
    compile((repository / "tensorrt_llm" / "1" / "model.py").read_text(), "model.py", "exec")
    text = read_config(repository / "preprocessing" / "config.pbtxt")
    assert text.parameters["tokenizer_dir"].string_value == str(engine)


def tensors(**own: Any) -> dict[str, Any]:
    plain = EngineRequest(input_ids=[1, 2], sampling=SamplingParams(max_tokens=3))
    return {**tensors_of(tensor_contract.encode_request(plain)), **own}


def test_mock_inputs_are_decoded() -> None:
    plain = decode_request(tensors())
    assert (plain.tps, plain.inject, plain.input_ids) == (None, None, [1, 2])
    own = {"tps": 33.5, "tokens_per_response": 4, "inject": "error", "inject_after": 2}
    arrays = {name: np.array([[value]]) for name, value in own.items()}
    arrays["inject"] = np.array([[b"error"]], object)
    assert decode_request(tensors(**arrays)) == replace(plain, **own)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tps", [[-1]], "tps=-1: must be at least 0"),
        ("tps", [[1, 2]], "tps: shape [1, 2]; must hold one value"),
        ("jitter", [[2]], "jitter=2: must be from 0 to 1"),
        ("tokens_per_response", [[0]], "tokens_per_response=0: must be at least 1"),
        ("inject", [[b"panic"]], "inject='panic': must be one of error, crash, hang"),
    ],
)
def test_invalid_mock_inputs_are_refused_by_name(name: str, value: Any, text: str) -> None:
    kind = object if name == "inject" else np.float32 if name in ("tps", "jitter") else np.int32
    with pytest.raises(InvalidArgument) as caught:
        decode_request(tensors(**{name: np.array(value, kind)}))
    assert text in caught.value.detail
