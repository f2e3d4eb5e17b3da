"""The command line: what it offers, and how it refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cog_triton import __version__
from cog_triton.cli import app
from cog_triton.settings import Settings, free_ports


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*Settings.model_fields, "host", "port", "cog_max_concurrency", "force_color"]
    for name in names:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_without_a_command_it_says_what_there_is() -> None:
    _, output = run()
    for command in ("build", "serve", "inspect", "prune"):
        assert f" {command} " in output


def test_the_version() -> None:
    assert run("--version") == (0, f"cog-triton {__version__}\n")


def test_it_is_also_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cog_triton", "--version"], capture_output=True, check=True
    )
    assert result.stdout.decode() == f"cog-triton {__version__}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("inspect",), ("ENGINE", "--check-gpu", "--json", "E1306", "E1305", "Example:")),
        ((), ("build", "serve", "--version")),
        (("build",), ("CONFIG", "--output", "-o", "--work-dir", "engine.tar", "Example:")),
        (
            ("serve",),
            (
                "ENGINE",
                "--host",
                "--port",
                "--triton-http-port",
                "--triton-grpc-port",
                "--triton-metrics-port",
                "--config",
                "--max-concurrency",
                "--verbose",
                "127.0.0.1",
                "5000",
                "Example:",
            ),
        ),
    ],
)
def test_help(command: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, output = run(*command, "--help")
    assert code == 0
    for word in words:
        assert word in output


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("build",),
        ("serve", "--port", "0"),
        ("serve", "--port", "65536"),
        ("serve", "--port", "http"),
        ("serve", "--max-concurrency", "0"),
        ("serve", "--frobnicate"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...]) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert "Usage" in output


def refusal(*arguments: str) -> str:
    code, output = run(*arguments)
    assert code == 1
    assert output.startswith("error: E1")
    assert "Traceback" not in output
    return output


def test_a_build_config_that_is_not_there(tmp_path: Path) -> None:
    assert "no.yaml" in refusal("build", str(tmp_path / "no.yaml"))


def test_a_build_config_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "build.yaml"
    path.write_text("frobnicate: [bold]1[/bold]")
    assert refusal("build", str(path)).startswith("error: E1300 BuildConfigInvalid: ")


def test_a_port_that_is_taken(taken: int) -> None:
    assert f"PORT={taken}: cannot listen on 127.0.0.1:{taken}" in refusal(
        "serve", "--port", str(taken)
    )


def test_the_port_of_the_environment(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", str(taken))
    assert f" PORT={taken}: " in refusal("serve")


@pytest.mark.parametrize("kind", ["http", "grpc", "metrics"])
def test_tritons_ports(kind: str, taken: int) -> None:
    (port,) = free_ports(1)
    name = f"TRITON_{kind.upper()}_PORT"
    others = [k for k in ("http", "grpc", "metrics") if k != kind]
    arguments = ["--port", str(port), f"--triton-{kind}-port", str(taken)]
    for other, free in zip(others, free_ports(2), strict=True):
        arguments += [f"--triton-{other}-port", str(free)]
    assert f"{name}={taken}: " in refusal("serve", *arguments)


def test_a_setting_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "[bold]many[/bold]")
    assert "E1005 InvalidArgument: WORLD_SIZE='[bold]many[/bold]'" in refusal("serve")
    monkeypatch.delenv("WORLD_SIZE")
    assert "TRITON_GRPC_PORT=0" in refusal("serve", "--triton-grpc-port", "0")


def test_triton_host_of_the_environment_is_heeded(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is taken on 127.0.0.1 only, so asking for another address is seen in the error."""
    monkeypatch.setenv("TRITON_HOST", "203.0.113.7")
    port, http = free_ports(2)
    said = refusal(
        "serve",
        *("--port", str(port), "--triton-http-port", str(http), "--triton-grpc-port", str(taken)),
    )
    assert "203.0.113.7" in said
