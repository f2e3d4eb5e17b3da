"""``cog-triton migrate``: what it writes and prints, and when it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cog_triton.cli.app import app

ROOT = Path(__file__).parents[2]
INT8 = str(ROOT / "configs" / "build" / "llama-2-7b-chat-int8.yaml")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["migrate", *arguments])


def test_writes_a_directory_and_says_what_is_lost() -> None:
    result = run(INT8)
    assert result.exit_code == 0, result.output
    written = json.loads(Path("llama-2-7b-chat-int8-vllm/model.json").read_text("utf-8"))
    assert written["max_model_len"] == 4096
    lines = result.output.splitlines()
    assert any(
        line.startswith("[lost] convert.args.weight_only_precision: 'int8'") for line in lines
    )
    assert any(line.startswith("[unneeded] build.args.gemm_plugin") for line in lines)
    assert "1 lost" in result.output
    assert "cog-triton serve llama-2-7b-chat-int8-vllm" in result.output


def test_overwrites_only_when_told() -> None:
    assert run(INT8, "-o", "engine").exit_code == 0
    again = run(INT8, "-o", "engine")
    assert again.exit_code == 1
    assert "E1005" in again.output
    assert "--force" in again.output
    assert run(INT8, "-o", "engine", "--force").exit_code == 0


def test_takes_a_file_or_prints_it() -> None:
    assert run(INT8, "-o", "mine.json").exit_code == 0
    assert json.loads(Path("mine.json").read_text("utf-8"))["model"]
    wrong = run(INT8, "-o", "mine.yaml")
    assert wrong.exit_code == 1
    assert "must be a directory, or end in .json" in wrong.output
    printed = run(INT8, "-o", "-")
    assert json.loads(printed.stdout) == json.loads(Path("mine.json").read_text("utf-8"))
    assert "[lost]" in printed.stderr


def test_json_has_findings() -> None:
    result = run(INT8, "--json")
    content = json.loads(result.output)
    assert content["path"] == "llama-2-7b-chat-int8-vllm/model.json"
    assert content["arguments"]["max_num_seqs"] == 32
    verdicts = {finding["option"]: finding["verdict"] for finding in content["findings"]}
    assert verdicts["convert.args.weight_only_precision"] == "lost"


def test_strict_ends_in_2_when_something_is_lost() -> None:
    assert run(INT8, "--strict").exit_code == 2
    whole = str(ROOT / "configs" / "build" / "qwen3-8b.yaml")
    assert run(whole, "--strict").exit_code == 0


def test_takes_the_serve_config_along() -> None:
    Path("serve.yaml").write_text("tensorrt_llm: {args: {enable_kv_cache_reuse: false}}", "utf-8")
    assert run(INT8, "--serve-config", "serve.yaml", "-o", "e").exit_code == 0
    assert json.loads(Path("e/model.json").read_text("utf-8"))["enable_prefix_caching"] is False


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nothing: here", "E1300"),
        ("model_id: m\nexample_name: lama\nbuild: {script: b.py, output_dir: e}", "E1301"),
    ],
)
def test_refuses_a_broken_config_by_code(text: str, code: str) -> None:
    Path("c.yaml").write_text(text, "utf-8")
    result = run("c.yaml")
    assert result.exit_code == 1
    assert code in result.output
    assert not Path("c-vllm").exists()


def test_a_config_for_vllm_needs_none() -> None:
    result = run(str(ROOT / "configs" / "build" / "vllm-qwen3-8b.yaml"))
    assert result.exit_code == 1
    assert "there is nothing to migrate" in result.output
