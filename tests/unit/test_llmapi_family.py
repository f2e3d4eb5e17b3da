"""LLM API family: what a directory says, how it is rendered, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from llmapi_engines import llmapi_engine
from tritonclient.grpc import model_config_pb2

from cog_triton.engines.llmapi.family import LLMAPIFamily
from cog_triton.engines.registry import open_engine
from cog_triton.errors import (
    EngineCorrupt,
    EngineIncompatible,
    InvalidPredictorConfig,
    UnexpectedEngineArg,
)
from cog_triton.models.model_name import recognize


def test_a_directory_with_llmapi_yaml_is_of_this_family(tmp_path: Path) -> None:
    engine = llmapi_engine(tmp_path / "engine", max_batch_size=8, max_seq_len=64)
    family = open_engine(engine)
    assert isinstance(family, LLMAPIFamily)
    assert (family.limits.max_seq_len, family.limits.max_input_len) == (64, 63)
    assert family.limits.max_batch_size == 8
    assert family.tokenizer_dir == engine
    assert recognize(str(engine)).family == "llmapi"


def test_prompts_are_as_long_as_one_step_takes(tmp_path: Path) -> None:
    short = open_engine(llmapi_engine(tmp_path / "a", max_num_tokens=32))
    assert short.limits.max_input_len == 32
    chunks = llmapi_engine(tmp_path / "b", max_num_tokens=32, enable_chunked_prefill=True)
    assert open_engine(chunks).limits.max_input_len == 127
    given = open_engine(llmapi_engine(tmp_path / "c", max_input_len=16))
    assert given.limits.max_input_len == 16


def test_guides_are_there_when_the_engine_compiles_grammars(tmp_path: Path) -> None:
    assert not open_engine(llmapi_engine(tmp_path / "a")).abilities.guides
    guided = open_engine(llmapi_engine(tmp_path / "b", guided_decoding_backend="xgrammar"))
    assert guided.abilities.guides == {"json_schema", "regex", "grammar"}


def test_it_renders_a_model_of_the_python_backend(tmp_path: Path) -> None:
    family = open_engine(llmapi_engine(tmp_path / "engine", max_batch_size=8))
    config = model_config_pb2.ModelConfig()
    text_format.Parse("name: 'tensorrt_llm' dynamic_batching {}", config)
    source = family.render(config, {"engine_python": "/opt/python"})
    assert source is not None
    assert "cog_triton.engines.llmapi.llmapi_host:LLMAPIHost" in source
    assert config.backend == "python"
    assert config.max_batch_size == 8
    assert not config.HasField("dynamic_batching")
    assert config.parameters["engine_python"].string_value == "/opt/python"
    assert config.parameters["engine_dir"].string_value == str(tmp_path / "engine")
    with pytest.raises(InvalidPredictorConfig, match="kv_cache_free_gpu_mem_fraction"):
        family.render(config, {"kv_cache_free_gpu_mem_fraction": 0.9})
    with pytest.raises(InvalidPredictorConfig, match="at least 1"):
        family.render(config, {"cancellation_check_period_ms": 0})


def test_what_no_version_takes_is_refused(tmp_path: Path) -> None:
    unknown = llmapi_engine(tmp_path / "a", max_batch_sice=8)
    with pytest.raises(UnexpectedEngineArg, match="max_batch_sice"):
        open_engine(unknown)
    nested = llmapi_engine(tmp_path / "b", kv_cache_config={"free_gpu_memory_fraction": "most"})
    with pytest.raises(InvalidPredictorConfig, match="free_gpu_memory_fraction='most'"):
        open_engine(nested)
    (tmp_path / "b" / "llmapi.yaml").write_text("[1]", "utf-8")
    with pytest.raises(EngineCorrupt, match="must be a YAML mapping"):
        open_engine(nested)
    (tmp_path / "b" / "config.json").unlink()
    (tmp_path / "b" / "llmapi.yaml").write_text("{}", "utf-8")
    with pytest.raises(InvalidPredictorConfig, match="model: missing"):
        open_engine(nested)


def test_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineIncompatible, match="no adapters by name"):
        open_engine(llmapi_engine(tmp_path / "engine")).lora_limits()
