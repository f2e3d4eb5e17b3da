"""Tokens while processes of the server are killed and stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stack import REPOSITORY

pytestmark = pytest.mark.integration


def test_no_token_is_lost_while_processes_are_killed(tmp_path: Path) -> None:
    """Some seconds here; 10^7 tokens are for the script alone."""
    script = REPOSITORY / "benchmarks" / "soak_steps.py"
    result = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", f"--json={result}"],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {item["name"]: item["value"] for item in json.loads(result.read_text())["figures"]}
    assert figures["tokens compared"] >= 20_000
