"""Settings: every environment variable is typed, and invalid values name their variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cog_triton.cli.app import app
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.errors import InvalidArgument
from cog_triton.removed import REMOVED, check_keys
from cog_triton.settings import load_settings


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ENGINE_DIR", "/engines/a", Path("/engines/a")),
        ("COG_WEIGHTS", "https://host/engine.tar", "https://host/engine.tar"),
        ("END_ID", "-1", -1),
        ("LOG_PERFORMANCE_METRICS", "true", True),
        ("LOG_PERFORMANCE_METRICS", "false", False),
        ("TRITON_TIMEOUT", "0.5", 0.5),
        ("OPENAI_PORT", "8080", 8080),
        ("OPENAI_PORT", "0", None),
        ("LOG_FORMAT", "", "json"),
        ("LOG_LEVEL", "WARN", "warning"),
        ("LOG_LEVEL", "Debug", "debug"),
        ("MOCK_JOIN", "false", False),
    ],
)
def test_a_variable_becomes_its_type(
    name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(load_settings(), name.lower()) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("END_ID", "-2"),
        ("LOG_PERFORMANCE_METRICS", "maybe"),
        ("TRITON_HTTP_PORT", "0"),
        ("TRITON_TIMEOUT", "0"),
        ("TRITON_TIMEOUT", "nan"),
        ("OPENAI_PORT", "-1"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
        ("COG_TRITON_ENGINE", "openvino"),
        ("MOCK_TPS", "fast"),
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


def test_the_api_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "xyzzy")
    settings = load_settings()
    assert "xyzzy" not in f"{settings!r}{settings}"
    assert settings.api_key == "xyzzy"


CHECKOUT = Path(__file__).parents[2]
COMMANDS = [name for name in REMOVED if name.startswith("cog-triton ")]
VARIABLES = [name for name in REMOVED if name.isupper()]


def names(file: str) -> set[str]:
    """Settings, commands, options and keys of a stored surface, as the table spells them."""
    found = set()
    for line in (CHECKOUT / "tests" / file).read_text("utf-8").splitlines():
        kind, _, name = line.partition(" ")
        if kind == "option" and " --" not in name:
            continue  # a short form goes with its long one
        if kind in ("setting", "command", "option", "key"):
            found.add(name)
    return found


def test_each_name_of_0_4_0_that_is_not_here_is_in_the_table() -> None:
    gone = names("surface-0.4.0.txt") - names("surface.txt")
    commands = {f"{name} " for name in gone if name in COMMANDS}
    options_of_commands = {name for name in gone if any(name.startswith(each) for each in commands)}
    assert gone - REMOVED.keys() - options_of_commands == set()
    assert REMOVED.keys() & names("surface.txt") == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_removed_command_or_option_is_refused(name: str) -> None:
    arguments = name.split()[1:]
    if "--" in name:
        arguments = [arguments[0], "a", f"{arguments[1]}=1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert said == f"error: E1005 InvalidArgument: {name} was removed: {REMOVED[name]}"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_removed_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(InvalidArgument) as refused:
        load_settings()
    assert str(refused.value).endswith(f"{name}='x' was removed: {REMOVED[name]}")
    monkeypatch.setenv(name, "False")
    load_settings()


def test_an_option_after_two_dashes_is_an_argument() -> None:
    said = CliRunner().invoke(app, ["inspect", "--", "--park"]).output
    assert "was removed" not in said


def test_a_removed_key_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="PARK_ENGINE was removed: "):
        check_keys(["max_tokens", "PARK_ENGINE"])


def test_mock_options_are_the_settings_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().mock_options == {}
    for name in MockOptions.__slots__:
        monkeypatch.setenv(f"MOCK_{name.upper()}", "1")
    options = load_settings().mock_options
    assert options == dict.fromkeys(MockOptions.__slots__[:7], 1)
    assert MockOptions.parse(options).max_batch_size == 1
