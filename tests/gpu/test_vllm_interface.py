"""The names of vLLM that our code uses are there, and its errors have our codes; needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_servers import NO_MULTICAST
from stack import REPOSITORY

pytestmark = pytest.mark.gpu

CHECKS = Path(__file__).with_name("interface_checks.py")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_classes_of_vllm_do_what_our_code_expects() -> None:
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
    done = subprocess.run(
        [sys.executable, CHECKS],
        env={**os.environ, **NO_MULTICAST, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) > 30
    wrong = [
        row
        for row in rows
        for _, found, expected in [row]
        if (not found.startswith(expected) if expected else found)
    ]
    assert wrong == []
