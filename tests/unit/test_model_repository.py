"""Model repository: rendered configs parse, contain the arguments, and are consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_openvino_family import engine

from cog_triton.engines import tensor_contract
from cog_triton.engines.generate_stream import STEP_MODEL
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.errors import InvalidPredictorConfig
from cog_triton.system.paths import triton_model_repo
from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import MODELS, ServeConfig

TEXT_MODELS = ("preprocessing", "postprocessing", "tensorrt_llm_bls")
INSTANCE_COUNTS = {
    "preprocessing": "preprocessing_instance_count",
    "postprocessing": "postprocessing_instance_count",
    "tensorrt_llm_bls": "bls_instance_count",
}


def render(directory: Path, arguments: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Every model's rendered config, parsed again."""
    family = OpenVINOFamily.open(engine(directory / "engine"))
    target = model_repository.render_repository(
        family, ServeConfig(arguments or {}), directory / "repo"
    )
    assert target == directory / "repo"
    models = (*MODELS, STEP_MODEL)
    assert sorted(path.name for path in target.iterdir()) == sorted(models)
    return {
        model: model_repository.read_config(target / model / "config.pbtxt") for model in models
    }


def refusal(directory: Path, model: str, name: str, value: Any) -> str:
    with pytest.raises(InvalidPredictorConfig) as caught:
        render(directory, {model: {name: value}})
    assert caught.value.detail.startswith(f"{model}.args.{name}={value!r}: ")
    return caught.value.detail


def test_every_model_is_rendered_and_parses_back(tmp_path: Path) -> None:
    configs = render(tmp_path)
    for model, config in configs.items():
        assert config.name == model
        assert config.max_batch_size == (0 if model == STEP_MODEL else 16), "the engine's own"
        assert (tmp_path / "repo" / model / "1").is_dir()


def test_the_step_model_carries_bytes_on_one_instance(tmp_path: Path) -> None:
    steps = render(tmp_path)[STEP_MODEL]
    tensors = [(item.name, item.data_type, item.dims) for item in (*steps.input, *steps.output)]
    assert tensors == [("call", 2, [-1]), ("bytes", 2, [-1])]  # TYPE_UINT8
    assert steps.model_transaction_policy.decoupled
    assert [group.count for group in steps.instance_group] == [1], "its calls are in order"


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm_bls"])
def test_instance_counts_are_set_per_model(model: str, tmp_path: Path) -> None:
    configs = render(tmp_path, {model: {INSTANCE_COUNTS[model]: 2}})
    assert [group.count for group in configs[model].instance_group] == [2]


@pytest.mark.parametrize("count", [1, 2, 64])
def test_postprocessing_is_limited_to_one_instance(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With more, Triton reorders the tokens of a stream; the configs of the original ask for 64."""
    name = "postprocessing_instance_count"
    configs = render(tmp_path, {"postprocessing": {name: count}})
    assert [group.count for group in configs["postprocessing"].instance_group] == [1]
    warned = f"postprocessing.args.{name}={count}: one instance" in caplog.text
    assert warned is (count > 1)


@pytest.mark.parametrize("value", [0, -1, "4", 1.5, True, None])
def test_instance_counts_must_be_positive_integers(value: Any, tmp_path: Path) -> None:
    refusal(tmp_path, "preprocessing", "triton_max_batch_size", value)
    refusal(tmp_path, "postprocessing", "postprocessing_instance_count", value)
    refusal(tmp_path, "tensorrt_llm_bls", "bls_instance_count", value)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_parameters_are_written_to_the_config(model: str, tmp_path: Path) -> None:
    name = "skip_special_tokens" if model == "postprocessing" else "add_special_tokens"
    config = render(tmp_path, {model: {name: False, "tokenizer_dir": "/tokenizer"}})[model]
    assert config.parameters[name].string_value.lower() == "false"
    assert config.parameters["tokenizer_dir"].string_value == "/tokenizer"


@pytest.mark.parametrize("model", MODELS)
def test_unknown_arguments_are_refused(model: str, tmp_path: Path) -> None:
    refusal(tmp_path, model, "frobnicate", 1)
    refusal(tmp_path, "ensemble", "bls_instance_count", 1)


@pytest.mark.parametrize(
    ("model", "name", "meant"),
    [
        ("preprocessing", "tokeniser_dir", "tokenizer_dir"),
        ("ensemble", "triton_max_batchsize", "triton_max_batch_size"),
        ("tensorrt_llm", "kv_cache_gbs", "kv_cache_gb"),
        ("tensorrt_llm_bls", "accumulate_token", "accumulate_tokens"),
    ],
)
def test_misspelt_arguments_are_refused_with_the_nearest_name(
    model: str, name: str, meant: str, tmp_path: Path
) -> None:
    assert f"did you mean {meant!r}" in refusal(tmp_path, model, name, 1)


def test_models_answer_whole_where_the_engines_does(tmp_path: Path) -> None:
    configs = render(tmp_path, {"tensorrt_llm": {"decoupled_mode": False}})
    decoupled = {name for name, c in configs.items() if c.model_transaction_policy.decoupled}
    assert decoupled == {STEP_MODEL}
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert configs[model].parameters["engine_streams"].string_value == "false"


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
def test_decoupled_mode_is_true_or_false(model: str, tmp_path: Path) -> None:
    assert "must be true or false" in refusal(tmp_path, model, "decoupled_mode", "yes")


def test_the_engines_model_has_every_input_of_the_contract() -> None:
    config = model_repository.read_config(triton_model_repo() / "tensorrt_llm" / "config.pbtxt")
    known = {tensor.name: tensor for tensor in config.input}
    rendered = {tensor_contract.LORA_NAME}  # for engines that have adapters by name
    contract = tensor_contract.SUPPORTED_INPUTS | tensor_contract._NEUTRAL.keys()
    assert known.keys() >= contract - rendered
    required = {name for name, tensor in known.items() if not tensor.optional}
    assert required == {"input_lengths", "request_output_len"}
