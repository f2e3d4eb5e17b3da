"""The smoke test of tests/smoke on the CPU image."""

from __future__ import annotations

import os
import subprocess
import sys

from factory import REPOSITORY, Image


def test_smoke_test_passes_on_the_cpu_image(cpu: Image) -> None:
    environment = {**os.environ, "LOCAL_TEST": "true", "COG_TRITON_IMAGE": cpu.reference}
    command = [sys.executable, "-m", "pytest", "-q", "tests/smoke"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
