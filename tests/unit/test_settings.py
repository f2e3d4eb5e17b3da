"""Settings: every environment variable is typed, and invalid values name their variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.errors import InvalidArgument
from cog_triton.settings import IMAGE_ENGINE_DIR, Settings, load_settings

VARIABLES = [name.upper() for name in Settings.model_fields]


def test_defaults() -> None:
    settings = load_settings()
    assert settings.engine_dir == IMAGE_ENGINE_DIR
    assert (settings.triton_host, settings.triton_url) == ("127.0.0.1", "http://127.0.0.1:8000")
    assert (settings.triton_grpc_port, settings.triton_metrics_port) == (8001, 8002)
    assert settings.world_size is None
    assert settings.log_performance_metrics is False
    assert settings.end_id is None
    assert settings.cog_weights is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ENGINE_DIR", "/engines/a", Path("/engines/a")),
        ("COG_WEIGHTS", "https://host/engine.tar", "https://host/engine.tar"),
        ("COG_TRITON_CONFIG", "serve.yaml", Path("serve.yaml")),
        ("STOP_SEQUENCES", "a,b", "a,b"),
        ("END_ID", "0", 0),
        ("END_ID", "-1", -1),
        ("LOG_PERFORMANCE_METRICS", "1", True),
        ("LOG_PERFORMANCE_METRICS", "true", True),
        ("LOG_PERFORMANCE_METRICS", "false", False),
        ("TRITON_HTTP_PORT", "65535", 65535),
        ("TRITON_TIMEOUT", "0.5", 0.5),
        ("OPENAI_PORT", "8080", 8080),
        ("OPENAI_PORT", "0", None),
        ("SERVED_MODEL_NAME", "small", "small"),
        ("LOG_FORMAT", "console", "console"),
        ("LOG_FORMAT", "", "json"),
        ("LOG_LEVEL", "", "info"),
        ("LOG_LEVEL", "WARN", "warning"),
        ("LOG_LEVEL", "Debug", "debug"),
        ("COG_TRITON_ENGINE", "mock", "mock"),
        ("MOCK_TPS", "0", 0),
        ("MOCK_JOIN", "false", False),
    ],
)
def test_values(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(load_settings(), name.lower()) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("END_ID", "two"),
        ("END_ID", "-2"),
        ("LOG_PERFORMANCE_METRICS", "maybe"),
        ("TRITON_HTTP_PORT", "0"),
        ("TRITON_HTTP_PORT", "65536"),
        ("TRITON_GRPC_PORT", "http"),
        ("TRITON_TIMEOUT", "0"),
        ("TRITON_TIMEOUT", "nan"),
        ("OPENAI_PORT", "-1"),
        ("OPENAI_PORT", "65536"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
        ("COG_TRITON_ENGINE", "openvino"),
        ("MOCK_TPS", "-1"),
        ("MOCK_TPS", "nan"),
        ("MOCK_TPS", "fast"),
        ("MOCK_JOIN", "maybe"),
    ],
)
def test_invalid_values_name_their_variable(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidArgument) as caught:
        load_settings()
    assert caught.value.detail.startswith(f"{name}={text!r}: ")
    assert len(caught.value.detail) > len(f"{name}={text!r}: ")


def test_what_is_blank_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    optional = [name for name, field in Settings.model_fields.items() if field.default is None]
    for name in optional:
        monkeypatch.setenv(name.upper(), "")
    settings = load_settings()
    assert {name: getattr(settings, name) or None for name in optional} == dict.fromkeys(optional)


def test_all_invalid_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("END_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "y")
    with pytest.raises(InvalidArgument, match=r"END_ID='x'.*WORLD_SIZE='y'"):
        load_settings()


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_HTTP_PORT", "1111")
    assert load_settings(triton_http_port=2222).triton_http_port == 2222
    with pytest.raises(InvalidArgument, match="TRITON_HTTP_PORT=0"):
        load_settings(triton_http_port=0)


def test_a_blank_engine_dir_is_not_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_DIR", "")
    assert load_settings().engine_dir == IMAGE_ENGINE_DIR


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("10.1.2.3", "http://10.1.2.3:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("fd00::2", "http://[fd00::2]:8000"),
    ],
)
def test_the_url_of_triton(host: str, url: str) -> None:
    settings = load_settings(triton_host=host)
    assert settings.triton_url == url
    assert httpx.URL(settings.triton_url).port == 8000


def test_the_work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings().work_dir == tmp_path / ".cache" / "cog-triton"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert load_settings().work_dir == tmp_path / "xdg" / "cog-triton"
    monkeypatch.setenv("COG_TRITON_WORK_DIR", str(tmp_path / "own"))
    assert load_settings().work_dir == tmp_path / "own"


def test_the_work_dir_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    work_dir = load_settings().work_dir
    assert work_dir.name == "cog-triton"
    assert work_dir.parent.is_dir()


def test_mock_options_are_the_settings_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().mock_options == {}
    for name in MockOptions.__slots__:
        monkeypatch.setenv(f"MOCK_{name.upper()}", "1")
    options = load_settings().mock_options
    assert options == dict.fromkeys(MockOptions.__slots__[:7], 1)
    assert MockOptions.parse(options).max_batch_size == 1


def test_the_api_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "xyzzy")
    settings = load_settings()
    assert "xyzzy" not in f"{settings!r}{settings}"
    assert settings.api_key == "xyzzy"
