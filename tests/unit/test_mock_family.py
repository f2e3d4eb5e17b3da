"""Mock family: engine directory, options, request inputs and the rendered repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tensor_contract import tensors_of

from cog_triton.artifact import engine_manifest
from cog_triton.bench.options import Options, parse_lengths
from cog_triton.bench.prompt_source import PromptSource
from cog_triton.engines import tensor_contract
from cog_triton.engines.base import options_of
from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.mock.mock_request import INPUTS, MockOptions, MockRequest, decode_request
from cog_triton.engines.mock.word_tokenizer import PASSAGE, WORDS
from cog_triton.engines.registry import open_engine
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import EngineCorrupt, InvalidArgument, InvalidPredictorConfig
from cog_triton.text.chat import parse_messages, render_messages
from cog_triton.text.detokenize import Detokenizer, Vocabulary
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


def test_the_directory_is_made_once_and_matches_its_manifest(tmp_path: Path) -> None:
    made = mock_directory.make_engine(tmp_path / "engines")
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert mock_directory.make_engine(tmp_path / "engines") == made
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before
    assert [path.name for path in (tmp_path / "engines").iterdir()] == [made.name]
    manifest = engine_manifest.load(made)
    assert manifest is not None
    assert manifest.model_id == "mock"
    engine_manifest.verify(made, manifest, checksums=True)
    assert engine_manifest.unlisted(manifest, engine_manifest.files_of(made)) == []


def test_the_directory_has_identical_content_wherever_it_is_made(
    engine: Path, tmp_path: Path
) -> None:
    other = mock_directory.make_engine(tmp_path)
    assert other.name == engine.name
    for path in engine.iterdir():
        assert (other / path.name).read_bytes() == path.read_bytes()


def test_output_decodes_to_the_passage_however_it_is_split(
    engine: Path, tokenizer: EngineTokenizer
) -> None:
    ids = mock_directory.read_model(engine).output_ids
    stream = Detokenizer.by(Vocabulary(tokenizer.tokenizer))
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(pieces) + stream.flush() == PASSAGE
    assert "" in pieces, "no character of the passage is of several tokens"
    assert {"本", "🌊"} <= set(PASSAGE)
    assert len(ids) < len(PASSAGE.split()) * 2, "words are tokens"


def test_known_words_are_one_token_and_others_one_per_byte(tokenizer: EngineTokenizer) -> None:
    assert len(WORDS.split()) > 300
    assert len(tokenizer.encode("Tell me about the sea")) == 5
    for text in ("xylophone", "größer 日本 🌊", "a  b\n\n\tc", "don't", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.tokenizer.decode(ids) == text
    assert len(tokenizer.encode("🌊")) == 4


def test_bench_prompts_have_one_token_per_word(tokenizer: EngineTokenizer) -> None:
    prompts = PromptSource(
        Options(url="", requests=1, input_lengths=parse_lengths("--n_input_tokens", "100"))
    )
    for number in range(20):
        assert len(tokenizer.encode(prompts.get(number).text)) == 100


def test_chat_template_renders(tokenizer: EngineTokenizer) -> None:
    messages = parse_messages(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    )
    text = render_messages(messages, None, tokenizer).text
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    special = [tokenizer.token_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [ids.count(token) for token in special] == [3, 2]


def test_family_matches_and_opens_its_engine(engine: Path, tmp_path: Path) -> None:
    assert not MockFamily.matches(tmp_path)
    family = open_engine(engine)
    assert isinstance(family, MockFamily)
    assert (family.limits.max_batch_size, family.limits.max_seq_len) == (256, 131_072)
    assert (family.world_size, family.abilities.guides) == (0, frozenset())


@pytest.mark.parametrize(
    "change",
    [
        {"output_ids": []},
        {"output_ids": [1.5]},
        {"output_ids": [True]},
        {"output_ids": [10**6]},
        {"output_ids": 3},
        {"eos_ids": [-1]},
        {"vocab_size": None},
        {"max_seq_len": "many"},
    ],
)
def test_invalid_mock_json_values_are_refused(
    change: dict[str, Any], engine: Path, tmp_path: Path
) -> None:
    content = json.loads((engine / "mock.json").read_text())
    (tmp_path / "mock.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(EngineCorrupt, match=r"mock\.json: not a mock engine"):
        mock_directory.read_model(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}"])
def test_a_malformed_mock_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mock.json").write_text(text)
    with pytest.raises(EngineCorrupt, match=r"mock\.json: not a mock engine"):
        open_engine(tmp_path)


ALL = {
    "tps": 33.5,
    "jitter": 0.25,
    "prefill_ms": 0.1,
    "tokens_per_response": 4,
    "join": False,
    "max_batch_size": 8,
    "cancellation_check_period_ms": 50,
}


def test_options_parse_from_yaml_and_from_parameters() -> None:
    assert MockOptions.parse({}) == MockOptions()
    assert MockOptions.parse(ALL) == MockOptions(**ALL)  # type: ignore[arg-type]
    assert MockOptions.parse({name: str(value) for name, value in ALL.items()}) == (
        MockOptions.parse(ALL)
    )


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("tps", -1, "a finite number, at least 0"),
        ("tps", "fast", "a finite number, at least 0"),
        ("tps", "inf", "a finite number, at least 0"),
        ("tps", float("nan"), "a finite number, at least 0"),
        ("tps", True, "a finite number"),
        ("tps", None, "a finite number"),
        ("jitter", 1.1, "a finite number, from 0 to 1"),
        ("jitter", "x", "a finite number, from 0 to 1"),
        ("tokens_per_response", 0, "a whole number, at least 1"),
        ("tokens_per_response", 1.5, "a whole number, at least 1"),
        ("tokens_per_response", True, "a whole number, at least 1"),
        ("max_batch_size", [1], "a whole number, at least 1"),
        ("join", 1, "true or false"),
        ("join", "maybe", "true or false"),
        ("join", None, "true or false"),
    ],
)
def test_invalid_options_are_refused_by_name(name: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidPredictorConfig) as caught:
        MockOptions.parse({name: value})
    assert f"tensorrt_llm.args.{name}={value!r}: must be {rule}" in caught.value.detail


def test_unknown_options_are_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidPredictorConfig, match=r"tpss=1.*did you mean 'tps'"):
        MockOptions.parse({"tpss": 1})


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


def test_environment_settings_override_the_serve_config() -> None:
    config = ServeConfig({"tensorrt_llm": {"tps": 1, "jitter": 0.5}, "ensemble": {"a": 1}})
    assert config.with_overrides("tensorrt_llm", {"tps": 9}).arguments == {
        "tensorrt_llm": {"tps": 9, "jitter": 0.5},
        "ensemble": {"a": 1},
    }
    assert ServeConfig().with_overrides("tensorrt_llm", {}).arguments_of("tensorrt_llm") == {}


def tensors(**own: Any) -> dict[str, Any]:
    plain = EngineRequest(input_ids=[1, 2], sampling=SamplingParams(max_tokens=3))
    return {**tensors_of(tensor_contract.encode_request(plain)), **own}


def test_a_request_without_mock_inputs_uses_the_server_options() -> None:
    request = decode_request(tensors())
    assert (request.tps, request.inject, request.inject_after) == (None, None, 0)
    assert (request.input_ids, request.sampling.max_tokens) == ([1, 2], 3)


def test_a_request_with_all_mock_inputs_is_decoded() -> None:
    request = decode_request(
        tensors(
            tps=np.array([[33.5]], np.float32),
            jitter=np.array([[0.5]], np.float32),
            prefill_ms=np.array([[0]], np.float32),
            tokens_per_response=np.array([[4]], np.int32),
            inject=np.array([[b"error"]], object),
            inject_after=np.array([[2]], np.int32),
        )
    )
    assert request == MockRequest(
        input_ids=[1, 2],
        sampling=decode_request(tensors()).sampling,
        tps=33.5,
        jitter=0.5,
        prefill_ms=0.0,
        tokens_per_response=4,
        inject="error",
        inject_after=2,
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tps", [[-1]], "tps=-1: must be at least 0"),
        ("tps", [[float("inf")]], "tps=inf: must be"),
        ("tps", [[1, 2]], "tps: shape [1, 2]; must hold one value"),
        ("jitter", [[2]], "jitter=2: must be from 0 to 1"),
        ("tokens_per_response", [[0]], "tokens_per_response=0: must be at least 1"),
        ("inject_after", [[-1]], "inject_after=-1: must be at least 0"),
        ("inject", [[b"panic"]], "inject='panic': must be one of error, crash, hang"),
        ("inject", [["\u00fc"]], "inject='\u00fc': must be one of"),
    ],
)
def test_invalid_mock_inputs_are_refused_by_name(name: str, value: Any, text: str) -> None:
    kind = object if name == "inject" else np.float32 if name in ("tps", "jitter") else np.int32
    with pytest.raises(InvalidArgument) as caught:
        decode_request(tensors(**{name: np.array(value, kind)}))
    assert text in caught.value.detail
