"""What users rely on is as it was kept; a change that is meant: ``make surface ARGS=--keep``."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def test_errors_settings_commands_and_schemas_are_as_kept() -> None:
    command = [sys.executable, "scripts/surface", "--check", "--only", "package"]
    checked = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
