"""vLLM family: its abilities, its Triton models, and the version of vLLM that decides."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import MAX_MODEL_LEN, hugging_face, vllm_engine

from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.generate_stream import STEP_MODEL
from cog_triton.engines.registry import open_engine
from cog_triton.engines.vllm import argument_types, family
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.errors import (
    EngineIncompatible,
    InvalidPredictorConfig,
)
from cog_triton.serving import engine_preparation
from cog_triton.settings import load_settings
from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import MODELS, ServeConfig


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


def test_engine_arguments_are_not_in_the_rendered_config(tmp_path: Path) -> None:
    vllm_engine(tmp_path / "engine", hf_token="hf_secret")
    engine = VLLMFamily.open(tmp_path / "engine")
    model_repository.render_repository(engine, ServeConfig(), tmp_path / "repo")
    for path in (tmp_path / "repo").rglob("*"):
        assert path.is_dir() or "hf_secret" not in path.read_text("utf-8")


def test_serve_config_sets_arguments_of_both_models(tmp_path: Path) -> None:
    configs = render(
        tmp_path,
        {
            "tensorrt_llm": {"engine_python": "/opt/vllm/bin/python"},
            "vllm_model": {"cancellation_check_period_ms": 5},
        },
    )
    parameters = configs["vllm_model"].parameters
    assert parameters["cancellation_check_period_ms"].string_value == "5"
    engine = configs["tensorrt_llm"].parameters["engine_python"].string_value
    assert engine == "/opt/vllm/bin/python"


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


def test_the_version_that_will_run_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        family, "installed_version", lambda python: asked.append(python) or "0.33.1"
    )
    arguments = {"tensorrt_llm": {"engine_python": "/opt/vllm/bin/python"}}
    configs = render(tmp_path, arguments)
    assert asked == ["/opt/vllm/bin/python"]
    assert configs["vllm_model"].parameters["vllm_version"].string_value == "0.33.1"


@pytest.mark.parametrize("version", ["0.34.0", "0.3.3"])
def test_a_version_that_was_never_run_is_refused_unless_allowed(
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(family, "installed_version", lambda _: version)
    with pytest.raises(EngineIncompatible) as caught:
        render(tmp_path)
    assert caught.value.detail == (
        f"vLLM {version}: this cog-triton was run with vLLM 0.33 only (docs/vllm.md);"
        " install it, or set COG_TRITON_VLLM_UNTESTED=1 to try this one"
    )
    assert not caplog.text
    configs = render(tmp_path, {"tensorrt_llm": {"allow_untested": "true"}})
    assert configs["tensorrt_llm"].parameters["allow_untested"].string_value == "true"
    assert f"COG_TRITON_VLLM_UNTESTED is set, so vLLM {version} is served" in caplog.text


def test_deterministic_is_an_option_of_the_engine(tmp_path: Path) -> None:
    configs = render(tmp_path, {"tensorrt_llm": {"deterministic": "true"}})
    assert configs["tensorrt_llm"].parameters["deterministic"].string_value == "true"
    with pytest.raises(InvalidPredictorConfig, match=r"deterministic='yes': must be true or false"):
        render(tmp_path, {"tensorrt_llm": {"deterministic": "yes"}})


def test_the_version_of_the_engines_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm-0.33.7.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.7\n"
    (tmp_path / "vllm-0.33.7.dist-info" / "METADATA").write_text(metadata)
    assert argument_types.installed_version(sys.executable) is None
    assert argument_types.installed_version("/no/such/python") is None
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert argument_types.installed_version(sys.executable) == "0.33.7"


@pytest.mark.parametrize("untested", [False, True])
def test_the_setting_allows_a_version_that_was_never_run(
    untested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "installed_version", lambda _: "0.40.0")
    monkeypatch.setattr(engine_preparation, "_require_compatible", lambda *_: None)
    settings = load_settings(
        cog_triton_work_dir=tmp_path / "work",
        engine_dir=vllm_engine(tmp_path / "engine"),
        cog_triton_vllm_untested=untested,
    )
    if not untested:
        with pytest.raises(EngineIncompatible, match="COG_TRITON_VLLM_UNTESTED=1"):
            engine_preparation.prepare_engine(settings, tmp_path)
        return
    prepared = engine_preparation.prepare_engine(settings, tmp_path)
    config = prepared.repository / "tensorrt_llm" / "config.pbtxt"
    parameters = model_repository.read_config(config).parameters
    assert parameters["allow_untested"].string_value == "true"


@pytest.mark.parametrize("configured", [False, True])
def test_the_setting_names_vllms_python_else_the_serve_config(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "installed_version", lambda _: None)
    monkeypatch.setattr(engine_preparation, "_require_compatible", lambda *_: None)
    config = tmp_path / "serve.yaml"
    own = {"engine_python": "/configured/python"}
    config.write_text(json.dumps({"tensorrt_llm": {"args": own}}))
    settings = load_settings(
        cog_triton_work_dir=tmp_path / "work",
        cog_triton_config=config,
        cog_triton_vllm_python=None if configured else "/set/python",
        engine_dir=vllm_engine(tmp_path / "engine"),
    )
    prepared = engine_preparation.prepare_engine(settings, tmp_path)
    rendered = prepared.repository / "tensorrt_llm" / "config.pbtxt"
    parameters = model_repository.read_config(rendered).parameters
    wanted = "/configured/python" if configured else "/set/python"
    assert parameters["engine_python"].string_value == wanted
