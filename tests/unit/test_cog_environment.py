"""Environment of Cog's process: settings as variables, absolute paths, log levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cog_triton.serving.cog_environment import cog_environment
from cog_triton.settings import load_settings


def environment(host: str = "127.0.0.1", *, verbose: bool = False, **settings: Any) -> Any:
    return cog_environment(load_settings(**settings), host, 5001, 16, verbose=verbose)


def test_http_ports_and_address_are_passed_on() -> None:
    found = environment("127.0.0.2", openai_port=8123)
    assert found["COG_HOST"] == "127.0.0.2"
    assert (found["OPENAI_PORT"], found["METRICS_PORT"]) == ("8123", "")


def test_options_of_the_mock_are_passed_on() -> None:
    found = environment(
        cog_triton_engine="mock", mock_tps=100, mock_max_batch_size=8, mock_join=False
    )
    assert found["COG_TRITON_ENGINE"] == "mock"
    assert (found["MOCK_TPS"], found["MOCK_MAX_BATCH_SIZE"]) == ("100.0", "8")
    assert load_settings(mock_join=found["MOCK_JOIN"]).mock_join is False


def test_paths_are_absolute_since_cog_runs_in_its_projects_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = environment(
        engine_dir="engine",
        cog_weights="engine.tar",
        cog_triton_config="serve.yaml",
        cog_triton_work_dir="work",
        tritonserver="bin/tritonserver",
    )
    assert found["ENGINE_DIR"] == str(tmp_path / "engine")
    assert found["COG_WEIGHTS"] == str(tmp_path / "engine.tar")
    assert found["COG_TRITON_CONFIG"] == str(tmp_path / "serve.yaml")
    assert found["COG_TRITON_WORK_DIR"] == str(tmp_path / "work")
    assert found["TRITONSERVER"] == str(tmp_path / "bin" / "tritonserver")


def test_ports_and_concurrency_are_passed_on() -> None:
    found = environment(triton_http_port=8123)
    assert found["TRITON_HTTP_PORT"] == "8123"
    assert found["TRITON_HOST"] == "127.0.0.1"
    assert found["PORT"] == "5001"
    assert found["COG_MAX_CONCURRENCY"] == "16"


@pytest.mark.parametrize("url", ["https://host/engine.tar?a=b", "file:///engines/a.tar"])
def test_weights_given_as_a_url_are_unchanged(url: str) -> None:
    assert environment(cog_weights=url)["COG_WEIGHTS"] == url


def test_cogs_log_level_is_error_unless_set_or_verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment()["COG_LOG_LEVEL"] == "error"
    assert "COG_LOG_LEVEL" not in environment(verbose=True)
    monkeypatch.setenv("COG_LOG_LEVEL", "debug")
    assert environment()["COG_LOG_LEVEL"] == "debug"


def test_what_serves_a_model_is_passed_on() -> None:
    assert environment()["COG_TRITON_VLLM_PYTHON"] == ""
    found = environment(cog_triton_vllm_python="/env/bin/python", served_model_name="org/name")
    assert found["COG_TRITON_VLLM_PYTHON"] == "/env/bin/python"
    assert found["SERVED_MODEL_NAME"] == "org/name"
