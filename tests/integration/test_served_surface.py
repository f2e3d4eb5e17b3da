"""What users see of a server is as it was kept; a change that is meant: ``make surface``."""

import subprocess
import sys

import pytest
from stack import REPOSITORY

pytestmark = pytest.mark.integration


def test_answers_schemas_metrics_and_models_are_as_kept() -> None:
    command = [sys.executable, "scripts/surface", "--check", "--only", "server"]
    checked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
