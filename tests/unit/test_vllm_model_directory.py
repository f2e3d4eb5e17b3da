"""Engine directory of vLLM: model.json and multi_lora.json are read, and checked by version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import MAX_MODEL_LEN, hugging_face, vllm_engine

from cog_triton.engines.registry import open_engine
from cog_triton.engines.vllm.model_directory import VLLMModel, read_model
from cog_triton.errors import (
    CogTritonError,
    EngineCorrupt,
    InvalidPredictorConfig,
    ModelUnavailable,
    UnexpectedEngineArg,
)


def model_json(directory: Path, version: str | None = None, **arguments: Any) -> VLLMModel:
    return read_model(vllm_engine(directory, **arguments), version)


def refusal(
    directory: Path, error: type[CogTritonError], version: str | None = None, **arguments: Any
) -> str:
    with pytest.raises(error) as caught:
        model_json(directory, version, **arguments)
    assert str(directory / "model.json") in caught.value.detail
    return caught.value.detail


def test_model_defaults_to_the_directory_of_model_json(tmp_path: Path) -> None:
    assert model_json(tmp_path).arguments["model"] == str(tmp_path)


@pytest.mark.parametrize("name", ["absolute", "relative", "dotted"])
def test_model_may_be_another_directory(name: str, tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "weights", max_position_embeddings=77)
    engine = tmp_path / "engine"
    engine.mkdir()
    path = {"absolute": str(model), "relative": "../weights", "dotted": "./../weights/."}[name]
    (engine / "model.json").write_text(json.dumps({"model": path}))
    read = read_model(engine)
    assert read.arguments["model"] == str(model)
    assert read.tokenizer_dir == model
    assert read.max_model_len == 77


def test_tokenizer_may_be_another_directory(tmp_path: Path) -> None:
    hugging_face(tmp_path / "other")
    read = model_json(tmp_path / "engine", tokenizer="../other")
    assert read.tokenizer_dir == tmp_path / "other"
    assert read.arguments["tokenizer"] == str(tmp_path / "other")


def test_a_hub_id_fails_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    detail = refusal(
        tmp_path, ModelUnavailable, model="facebook/opt-125m", download_dir=str(tmp_path / "hub")
    )
    assert "model='facebook/opt-125m'" in detail


def test_a_cached_hub_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = tmp_path / "hub"
    snapshot = cache / "models--facebook--opt-125m" / "snapshots" / ("a" * 40)
    hugging_face(snapshot, max_position_embeddings=2048)
    (cache / "models--facebook--opt-125m" / "refs").mkdir()
    (cache / "models--facebook--opt-125m" / "refs" / "main").write_text("a" * 40)
    read = model_json(tmp_path / "e", model="facebook/opt-125m", download_dir=str(cache))
    assert read.arguments["model"] == "facebook/opt-125m"
    assert read.tokenizer_dir == snapshot
    assert read.max_model_len == 2048


def test_model_json_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(InvalidPredictorConfig, match="model: missing"):
        read_model(tmp_path)


def test_missing_weights_are_refused_unless_the_format_is_dummy(tmp_path: Path) -> None:
    vllm_engine(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineCorrupt, match="no weights"):
        read_model(tmp_path)
    (tmp_path / "model.json").write_text('{"load_format": "dummy"}')
    assert read_model(tmp_path).max_model_len == MAX_MODEL_LEN


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_malformed_model_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(EngineCorrupt, match=r"model\.json"):
        open_engine(tmp_path)


def test_arguments_are_converted_to_their_types(tmp_path: Path) -> None:
    read = model_json(
        tmp_path,
        gpu_memory_utilization=1,
        tensor_parallel_size="2",
        enforce_eager="True",
        max_num_seqs=7,
        max_model_len=32,
        dtype="bfloat16",
    )
    assert read.arguments == {
        "model": str(tmp_path),
        "gpu_memory_utilization": 1.0,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "max_num_seqs": 7,
        "dtype": "bfloat16",
        "max_model_len": 32,
    }
    assert read.max_model_len == 32
    assert read.max_num_seqs == 7


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        ("0.33.0", {"max_num_queued_reqs": 2, "kv_cache_dtype": "a_plugins_own"}),
        (None, {"max_num_queued_reqs": 2}),
        ("0.34.0", {"brand_new": 1}),
    ],
)
def test_names_of_the_version_are_taken(
    version: str | None, arguments: dict[str, Any], tmp_path: Path
) -> None:
    read = read_model(vllm_engine(tmp_path, **arguments), version)
    assert arguments.items() <= read.arguments.items()


@pytest.mark.parametrize(
    ("version", "arguments", "error", "words"),
    [
        (None, {"gpu_memory_utilisation": 1}, UnexpectedEngineArg, "'gpu_memory_utilization'"),
        (None, {"max_num_sequences": 2}, UnexpectedEngineArg, "vLLM 0.33.0 has no such engine"),
        (None, {"_api_process_count": 2}, UnexpectedEngineArg, "_api_process_count"),
        ("0.33.0", {"max_num_sequences": 2}, UnexpectedEngineArg, "did you mean 'max_num_seqs'?"),
        ("0.33.0", {"mamba_cache_mode": "all"}, InvalidPredictorConfig, "null (vLLM 0.33.0)"),
        (None, {"tensor_parallel_size": "two"}, InvalidPredictorConfig, "size='two': must be a"),
        (None, {"gpu_memory_utilization": True}, InvalidPredictorConfig, "must be a number"),
        (None, {"dtype": "bf16"}, InvalidPredictorConfig, "must be auto or bfloat16"),
        (None, {"max_lora_rank": 12}, InvalidPredictorConfig, "must be 1 or 128"),
        (None, {"compilation_config": 3}, InvalidPredictorConfig, "must be an object"),
        (None, {"model": ["a"]}, InvalidPredictorConfig, "must be text"),
        (None, {"max_model_len": -1}, InvalidPredictorConfig, "max_model_len=-1: must be at least"),
        (None, {"model": "/no/such/dir"}, ModelUnavailable, "'/no/such/dir'"),
    ],
)
def test_what_a_version_does_not_take_is_refused_by_name(
    version: str | None,
    arguments: dict[str, Any],
    error: type[CogTritonError],
    words: str,
    tmp_path: Path,
) -> None:
    assert words in refusal(tmp_path, error, version, **arguments)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "text_config": {"max_position_embeddings": 99}}, 99),
        ({"max_position_embeddings": None}, 2048),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            4096,
        ),
    ],
)
def test_max_model_len_is_derived_from_the_models_config(
    config: dict[str, Any], length: int, tmp_path: Path
) -> None:
    vllm_engine(tmp_path)
    hugging_face(tmp_path, **config)
    read = read_model(tmp_path)
    assert read.max_model_len == read.arguments["max_model_len"] == length


def test_the_tokenizers_length_is_a_limit_too(tmp_path: Path) -> None:
    vllm_engine(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    assert read_model(tmp_path).max_model_len == 64
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert read_model(tmp_path).max_model_len == MAX_MODEL_LEN


def test_adapters_are_read_from_multi_lora_json(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "one").mkdir(parents=True)
    loras = {"one": "adapters/one", "two": "org/two"}
    (tmp_path / "multi_lora.json").write_text(json.dumps(loras))
    assert model_json(tmp_path).loras == {}
    read = model_json(tmp_path, enable_lora="true")
    assert read.arguments["enable_lora"] is True
    assert read.loras == {"one": str(tmp_path / "adapters" / "one"), "two": "org/two"}


@pytest.mark.parametrize("text", ["", "[]", '{"one": 1}', '{"one": ""}'])
def test_a_malformed_multi_lora_json_is_refused(text: str, tmp_path: Path) -> None:
    vllm_engine(tmp_path, enable_lora=True)
    assert read_model(tmp_path).loras == {}, "the serve config may name them"
    (tmp_path / "multi_lora.json").write_text(text)
    with pytest.raises(EngineCorrupt, match=r"multi_lora\.json"):
        read_model(tmp_path)
