"""``cog-triton bench`` against real Cog and Triton, with a mock engine of known timing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.full]

TPS = 400


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("mock"), None)
    running.command += ["--engine", "mock", f"--tps={TPS}"]
    with running.served():
        yield running


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
        assert 0 < metrics["ttft"][point] <= metrics["e2el"][point] < 60
    if metrics["tpot"]["count"] == found["completed"]:  # a busy machine may bring one at once
        mean = metrics["ttft"]["mean"] + metrics["tpot"]["mean"] * (tokens - 1)
        assert mean == pytest.approx(metrics["e2el"]["mean"], rel=1e-6)
    busy = found["rates"]["output_tokens"] * found["seconds"]
    assert busy == pytest.approx(found["completed"] * tokens)


@pytest.mark.parametrize(
    ("line", "tokens", "tps"),
    [
        (
            "--target cog-triton --rate 8 --unit rps --duration 30 --n_input_tokens 100"
            " --n_output_tokens 100",
            100,
            TPS,
        ),
        (
            "--unit batch --duration 10 --tps 100 --n_output_tokens 128 --output_method yield"
            " --rate 24",
            128,
            100,
        ),
    ],
)
def test_command_lines_of_the_original_run_unchanged(
    line: str, tokens: int, tps: int, mock: Stack, tmp_path: Path
) -> None:
    """As they are; only --requests ends them sooner."""
    bench(mock, *line.split(), "--requests", 24, "--json", tmp_path / "a.json")
    found = numbers(tmp_path / "a.json")
    assert found["completed"] == 24
    sane(found, tokens)
    ours = found["metrics"]
    assert ours["input_tokens"]["min"] == ours["input_tokens"]["max"] >= 100
    assert ours["ttft_from_sending"]["min"] >= 1 / tps
    assert ours["e2el_from_sending"]["min"] >= tokens / tps
    assert ours["server_tps"]["count"] == 24
    assert ours["server_tps"]["max"] <= tps
    assert ours["server_latency"]["mean"] <= ours["e2el_from_sending"]["mean"]
    assert ours["server_ttft"]["mean"] <= ours["ttft_from_sending"]["mean"]


def test_output_method_wait_has_one_latency(mock: Stack, tmp_path: Path) -> None:
    """Its first text is its last: that time is its latency, and no other is told for it."""
    bench(
        mock,
        *("--unit", "concurrency", "--rate", 3, "--requests", 3, "--warmup", 0),
        *("--n_input_tokens", 9, "--n_output_tokens", 28, "--tps", 100),
        *("--output_method", "wait", "--json", tmp_path / "a.json"),
    )
    found = numbers(tmp_path / "a.json")
    assert found["completed"] == 3
    metrics = found["metrics"]
    assert metrics["server_ttft"]["min"] >= 0.01, "the engine's, however it is sent"
    assert metrics["server_ttft"]["max"] <= metrics["server_latency"]["max"]
    assert metrics["output_tokens"]["min"] == metrics["output_tokens"]["max"] == 28
    assert metrics["e2el_from_sending"]["min"] >= 0.28
    assert not {"ttft", "ttft_from_sending", "itl", "tpot"} & metrics.keys()
    assert metrics["single_stream_tps"]["max"] <= 100


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("cog-triton", []),
        ("triton", []),
        ("triton", ["--model", "tensorrt_llm"]),
        ("openai", []),
    ],
)
def test_every_target_counts_all_tokens(
    target: str, more: list[str], mock: Stack, tmp_path: Path
) -> None:
    bench(
        mock,
        *("--target", target, "--unit", "concurrency", "--rate", 3, "--requests", 7),
        *("--n_input_tokens", 24, "--n_output_tokens", 6, *more),
        *("--json", tmp_path / "a.json"),
    )
    found = numbers(tmp_path / "a.json")
    assert found["completed"] == 7
    assert found["concurrency"] <= 3
    sane(found, 6)


def test_failed_requests_are_counted_by_code(mock: Stack) -> None:
    said = bench(
        mock,
        *("--requests", 2, "--rate", 20, "--warmup", 0, "--input", "prompt= "),
        code=1,
    )
    assert "E1001: 2, such as: " in said
    assert "Requests: 0 completed, 2 failed" in said
