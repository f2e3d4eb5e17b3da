"""The benchmark against the real Cog, the real Triton and the real model."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack import Stack

pytestmark = pytest.mark.integration

SECTIONS = (
    "Test Configuration:",
    "Concurrency levels:",
    "Statistics for completed predictions:",
    "Single-stream TPS:",
    "Server-side metrics:",
    "E2E throughput: ",
    "Load generator:",
)


def bench(stack: Stack, *arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cog_triton", "bench", *map(str, arguments)],
        env={**stack.environment, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def numbers(path: Path) -> dict[str, Any]:
    (only,) = json.loads(path.read_text())["runs"]
    found: dict[str, Any] = only
    assert found["failed"] == 0, found["examples"]
    return found


def sane(found: dict[str, Any], tokens: int) -> None:
    """What must hold whatever the machine's speed is."""
    metrics = found["metrics"]
    assert metrics["output_tokens"]["min"] == metrics["output_tokens"]["max"] == tokens
    for point in ("mean", "p50", "p99", "max"):
        assert 0 < metrics["ttft"][point] < metrics["e2el"][point] < 60
    if metrics["tpot"]["count"] == found["completed"]:  # a busy machine may bring one at once
        mean = metrics["ttft"]["mean"] + metrics["tpot"]["mean"] * (tokens - 1)
        assert mean == pytest.approx(metrics["e2el"]["mean"], rel=1e-6)
    busy = found["rates"]["output_tokens"] * found["seconds"]
    assert busy == pytest.approx(found["completed"] * tokens)


@pytest.mark.parametrize(
    "line",
    [
        "--target cog-triton --rate 8 --unit rps --duration 1 --n_input_tokens 20"
        " --n_output_tokens 8",
        "--unit batch --duration 1 --tps 100 --n_output_tokens 8 --output_method yield --rate 6",
    ],
)
def test_the_seeds_command_lines(line: str, stack: Stack, tmp_path: Path) -> None:
    said = bench(stack, *line.split(), "--json", tmp_path / "a.json")
    for section in SECTIONS:
        assert section in said
    found = numbers(tmp_path / "a.json")
    assert found["completed"] == found["made"] > 0
    sane(found, 8)
    server, ours = found["server"], found["metrics"]
    assert server["tps"]["actual"]["count"] == found["completed"]
    assert server["latency"]["actual"]["mean"] <= ours["e2el_from_sending"]["mean"]
    assert server["ttft"]["actual"]["mean"] <= ours["ttft_from_sending"]["mean"]


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("cog-triton", ["--output_method", "wait"]),
        ("cog-triton", ["--processes", "2"]),
        ("triton", []),
        ("triton", ["--model", "tensorrt_llm"]),
        ("openai", []),
        ("openai", ["--api", "completions"]),
    ],
)
def test_every_target(
    target: str, more: list[str], stack: Stack, engine_dir: Path, tmp_path: Path
) -> None:
    bench(
        stack,
        *("--target", target, "--unit", "concurrency", "--rate", 3, "--requests", 7),
        *("--n_input_tokens", 24, "--n_output_tokens", 6, "--tokenizer", engine_dir, *more),
        *("--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv"),
    )
    found = numbers(tmp_path / "a.json")
    assert found["completed"] == 7
    assert found["concurrency"]["max"] <= 3
    if "wait" in more:
        assert found["metrics"]["output_tokens"]["mean"] == 6
        assert "ttft" not in found["metrics"]
    else:
        sane(found, 6)
    with (tmp_path / "a.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 7
    exact = {"--model": "tensorrt_llm", "--api": "completions"}
    if any(exact.get(name) in more for name in more):
        assert {row["input_tokens"] for row in rows} == {"24"}


def test_what_prometheus_says_agrees(stack: Stack, tmp_path: Path) -> None:
    bench(
        stack,
        *("--target", "openai", "--requests", 4, "--rate", 20, "--n_output_tokens", 6),
        *("--json", tmp_path / "a.json"),
    )
    told = numbers(tmp_path / "a.json")["prometheus"]
    assert told["cog_triton_generation_tokens_total"] == 24
    assert told["cog_triton_time_to_first_token_seconds"] > 0


def test_failures_have_their_code(stack: Stack) -> None:
    said = bench(
        stack,
        *("--requests", 2, "--rate", 20, "--warmup", 0, "--input", "prompt= "),
        code=1,
    )
    assert "E1001: 2, such as: " in said
    assert "Failure rate: 1.000, Total failures: 2" in said
