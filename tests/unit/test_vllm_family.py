"""vLLM family: its engine directory, abilities, Triton models, and the version that decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import MAX_MODEL_LEN, VISION, hugging_face, vllm_engine

from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.generate_stream import STEP_MODEL
from cog_triton.engines.registry import open_engine
from cog_triton.engines.vllm import family
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.engines.vllm.model_directory import VLLMModel, read_model
from cog_triton.errors import (
    CogTritonError,
    EngineCorrupt,
    EngineIncompatible,
    InvalidPredictorConfig,
    ModelUnavailable,
    UnexpectedEngineArg,
)
from cog_triton.serving import engine_preparation
from cog_triton.settings import load_settings
from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import MODELS, ServeConfig


def model_json(directory: Path, version: str | None = None, **arguments: Any) -> VLLMModel:
    return read_model(vllm_engine(directory, **arguments), version)


def refusal(
    directory: Path, error: type[CogTritonError], version: str | None = None, **arguments: Any
) -> str:
    with pytest.raises(error) as caught:
        model_json(directory, version, **arguments)
    assert str(directory / "model.json") in caught.value.detail
    return caught.value.detail


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
        (None, {"_api_process_count": 2}, UnexpectedEngineArg, "_api_process_count"),
        ("0.33.0", {"max_num_sequences": 2}, UnexpectedEngineArg, "did you mean 'max_num_seqs'?"),
        ("0.33.0", {"mamba_cache_mode": "all"}, InvalidPredictorConfig, "null (vLLM 0.33.0)"),
        (None, {"tensor_parallel_size": "two"}, InvalidPredictorConfig, "size='two': must be a"),
        (None, {"dtype": "bf16"}, InvalidPredictorConfig, "must be auto or bfloat16"),
        (None, {"max_lora_rank": 12}, InvalidPredictorConfig, "must be 1 or 128"),
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


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "installed_version", lambda _: None)


@pytest.mark.parametrize(("policy", "heeds"), [("priority", True), ("fcfs", False), (None, False)])
def test_priorities_are_told_to_a_scheduler_that_heeds_them(
    tmp_path: Path, policy: str | None, heeds: bool
) -> None:
    arguments = {} if policy is None else {"scheduling_policy": policy}
    assert open_engine(vllm_engine(tmp_path, **arguments)).abilities.priorities is heeds


def test_adapters_are_checked_against_model_json_and_the_base_model(tmp_path: Path) -> None:
    weights = hugging_face(tmp_path / "weights", hidden_size=16, num_hidden_layers=2)
    engine = tmp_path / "engine"
    engine.mkdir()

    def limits(**arguments: Any) -> LoRALimits:
        (engine / "model.json").write_text(json.dumps({"model": str(weights), **arguments}))
        return VLLMFamily.open(engine).lora_limits()

    with pytest.raises(EngineIncompatible, match=r"model\.json: has no .enable_lora.: true"):
        limits()
    assert limits(enable_lora=True) == LoRALimits(
        max_rank=16, max_loras=1, hidden_size=16, layers=2
    )
    found = limits(enable_lora=True, max_lora_rank=32, max_loras=4, lora_target_modules=["q_proj"])
    assert (found.max_rank, found.max_loras, found.modules) == (32, 4, {"q_proj"})


def render(directory: Path, arguments: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    engine = VLLMFamily.open(vllm_engine(directory / "engine", max_num_seqs=16))
    target = model_repository.render_repository(
        engine, ServeConfig(arguments or {}), directory / "repo"
    )
    names = sorted([*MODELS, STEP_MODEL, "vllm_model"])
    assert sorted(path.name for path in target.iterdir()) == names
    return {name: model_repository.read_config(target / name / "config.pbtxt") for name in names}


def test_repository_has_the_token_model_and_the_text_model(tmp_path: Path) -> None:
    configs = render(tmp_path)
    engine, text = configs["tensorrt_llm"], configs["vllm_model"]
    assert engine.backend == text.backend == "python"
    assert (engine.max_batch_size, text.max_batch_size) == (16, 0)
    assert text.parameters["max_input_len"].string_value == str(MAX_MODEL_LEN - 1)
    assert text.parameters["vllm_version"].string_value == "0.33.0"
    for name in ("tensorrt_llm", "vllm_model"):
        code = (tmp_path / "repo" / name / "1" / "model.py").read_text("utf-8")
        assert "TritonPythonModel" in code
        compile(code, name, "exec")
    tokenizer_dir = configs["preprocessing"].parameters["tokenizer_dir"].string_value
    assert tokenizer_dir == str(tmp_path / "engine")


@pytest.mark.parametrize(
    ("model", "name", "value", "hint"),
    [
        ("tensorrt_llm", "engine_pyton", "x", "did you mean 'engine_python'"),
        ("tensorrt_llm", "cancellation_check_period_ms", 0, "at least 1"),
        ("vllm_model", "cancellation_check_ms", 5, "did you mean 'cancellation_check_period_ms'"),
        ("vllm_model", "vllm_vers", "x", "unknown argument"),
    ],
)
def test_unknown_serve_config_arguments_are_refused(
    model: str, name: str, value: Any, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidPredictorConfig, match=f"{model}.args.{name}") as caught:
        render(tmp_path, {model: {name: value}})
    assert hint in caught.value.detail


@pytest.mark.parametrize("version", ["0.34.0", "0.3.3"])
def test_a_version_that_was_never_run_is_refused_unless_allowed(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(family, "installed_version", lambda python: asked.append(python) or version)
    own = {"engine_python": "/opt/vllm/bin/python"}
    with pytest.raises(EngineIncompatible, match=rf"vLLM {version}: .* COG_TRITON_VLLM_UNTESTED=1"):
        render(tmp_path, {"tensorrt_llm": own})
    assert asked == ["/opt/vllm/bin/python"]
    configs = render(tmp_path, {"tensorrt_llm": {"allow_untested": "true", **own}})
    assert configs["tensorrt_llm"].parameters["allow_untested"].string_value == "true"
    assert configs["vllm_model"].parameters["vllm_version"].string_value == version


@pytest.mark.parametrize("configured", [False, True])
def test_settings_name_vllms_python_and_allow_its_version_unless_the_serve_config_does(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "installed_version", lambda _: "0.40.0")
    monkeypatch.setattr(engine_preparation, "_require_compatible", lambda *_: None)
    config = tmp_path / "serve.yaml"
    own = {"engine_python": "/configured/python"} if configured else {}
    config.write_text(json.dumps({"tensorrt_llm": {"args": own}}))
    settings = load_settings(
        cog_triton_work_dir=tmp_path / "work",
        cog_triton_config=config,
        cog_triton_vllm_python=None if configured else "/set/python",
        cog_triton_vllm_untested=True,
        engine_dir=vllm_engine(tmp_path / "engine"),
    )
    prepared = engine_preparation.prepare_engine(settings, tmp_path)
    rendered = prepared.repository / "tensorrt_llm" / "config.pbtxt"
    parameters = model_repository.read_config(rendered).parameters
    wanted = "/configured/python" if configured else "/set/python"
    assert parameters["engine_python"].string_value == wanted
    assert parameters["allow_untested"].string_value == "true"


@pytest.mark.parametrize(
    ("arguments", "embeds"),
    [
        ({}, False),
        ({"runner": "generate"}, False),
        ({"runner": "pooling"}, True),
        ({"convert": "embed"}, True),
    ],
)
def test_model_json_says_whether_the_model_makes_embeddings(
    tmp_path: Path, arguments: dict[str, Any], embeds: bool
) -> None:
    made = VLLMFamily.open(vllm_engine(tmp_path / "engine", **arguments))
    assert (made.abilities.embeddings, made.abilities.generation) == (embeds, not embeds)
    assert made.limits.max_input_len == MAX_MODEL_LEN - (not embeds)
    assert made.abilities.guides is not embeds


LLAMA = {"architectures": ["LlamaForCausalLM"]}
MARK = "<|vision_start|>"


@pytest.mark.parametrize(
    ("config", "arguments", "count", "placeholder"),
    [
        (LLAMA, {}, 0, None),
        ({}, {}, 0, None),
        ({"architectures": "Qwen2VLForConditionalGeneration"}, {}, 0, None),
        (VISION, {}, 999, "<|vision_start|><|image_pad|><|vision_end|>"),
        (VISION, {"limit_mm_per_prompt": {"image": 2, "video": 0}}, 2, MARK),
        (VISION, {"limit_mm_per_prompt": {"image": {"count": 3, "width": 9}}}, 3, MARK),
        (VISION, {"language_model_only": True}, 0, MARK),
        ({"architectures": ["PixtralForConditionalGeneration"]}, {}, 999, None),
        ({"architectures": ["Phi3VForCausalLM"]}, {}, 999, "<|image_{}|>"),
        # A model that no record has, but whose owner knows better.
        ({"architectures": ["Newer"]}, {"limit_mm_per_prompt": {"image": 1}}, 1, None),
        (LLAMA, {"hf_overrides": {"architectures": VISION["architectures"]}}, 999, MARK),
    ],
)
def test_models_that_take_images_are_known_by_their_architecture(
    config: dict[str, Any],
    arguments: dict[str, Any],
    count: int,
    placeholder: str | None,
    tmp_path: Path,
) -> None:
    abilities = VLLMFamily.open(vllm_engine(tmp_path, config=config, **arguments)).abilities
    assert abilities.images == count
    assert (abilities.image_placeholder or "").startswith(placeholder or "")
    assert (abilities.image_placeholder is None) is (placeholder is None)


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2}, 12),
    ],
)
def test_an_engine_needs_the_gpus_of_all_its_ranks(
    arguments: dict[str, Any], gpus: int, tmp_path: Path
) -> None:
    made = vllm_engine(tmp_path, max_num_seqs=3, **arguments)
    assert VLLMFamily.open(made).gpus == gpus
    assert read_model(made).max_num_seqs == 3 * arguments.get("data_parallel_size", 1)
