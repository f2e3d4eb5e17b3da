"""aiperf against the real server: everything it sends is taken, and both count the same.

Runs where AIPERF names the program, or PATH has it; docs/bench.md says how to install it. What is
measured depends on the machine and is not judged here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _aiperf
import pytest
from _servers import Server, mock_server
from stack import REPOSITORY

from cog_triton.engines.mock import mock_directory

AIPERF = os.environ.get("AIPERF") or shutil.which("aiperf")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not AIPERF, reason="aiperf is not here; AIPERF can name it (docs/bench.md)"),
]

INPUT, OUTPUT, REQUESTS = 60, 12, 6


def test_aiperf_beside_our_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, REPOSITORY / "benchmarks" / "aiperf_beside.py"),
            *("--aiperf", str(AIPERF), "--artifacts", tmp_path, "--rounds", "1", "--warmup", "1"),
            *("--concurrency", "2", "--requests", str(REQUESTS)),
            *("--n_input_tokens", str(INPUT), "--n_output_tokens", str(OUTPUT)),
        ],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for title in ("TTFT, ms", "ITL (our TPOT), ms", "Request latency, ms", "Output tokens/s"):
        assert title in done.stdout
    theirs = _report(tmp_path / "aiperf-1" / "profile_export_aiperf.json")
    (ours,) = _report(tmp_path / "bench-1.json")["runs"]
    assert theirs["error_summary"] == []
    assert theirs["request_count"]["avg"] == ours["completed"] == REQUESTS
    assert theirs["output_sequence_length"]["min"] == theirs["output_sequence_length"]["max"]
    assert theirs["output_sequence_length"]["avg"] == OUTPUT
    template = theirs["input_sequence_length"]["avg"] - INPUT
    assert template > 0, "the chat template is counted by the server"
    assert ours["metrics"]["input_tokens"]["mean"] - INPUT == template
    server = _report(tmp_path / "aiperf-1" / "server_metrics_export.json")["metrics"]
    (series,) = server["cog_triton_generation_tokens"]["series"]
    assert series["stats"]["total"] > 0, "our /metrics is found and read"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with mock_server(tps=200) as running:
        yield running


@pytest.mark.parametrize(
    "more",
    [
        ("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--per-chunk-usage"),
        ("--endpoint-type", "completions", "--streaming"),
        ("--endpoint-type", "chat"),
    ],
)
def test_other_ways_to_ask(more: tuple[str, ...], server: Server, tmp_path: Path) -> None:
    artifacts = tmp_path / "aiperf"
    words = [
        *(str(AIPERF), "profile", "--model", "mock", "--url", server.openai),
        *("--tokenizer", str(mock_directory.make(tmp_path / "engine")), "--ui", "none"),
        *("--no-gpu-telemetry", "--artifact-dir", str(artifacts), "--request-count", "4"),
        *("--synthetic-input-tokens-mean", str(INPUT), "--output-tokens-mean", str(OUTPUT)),
        *("--extra-inputs", "ignore_eos:true", *more),
    ]
    found = _aiperf.run(words, artifacts)
    assert found["error_summary"] == []
    assert found["request_count"]["avg"] == 4
    assert found["output_sequence_length"]["avg"] == OUTPUT


def _report(path: Path) -> Any:
    return json.loads(path.read_text())
