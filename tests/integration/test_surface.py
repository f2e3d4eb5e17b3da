"""The names that users rely on are stored; a change that is meant: ``make surface ARGS=--keep``."""

import subprocess
import sys

import pytest
from stack import REPOSITORY

pytestmark = pytest.mark.integration


def test_the_names_that_users_rely_on_are_stored() -> None:
    command = [sys.executable, "scripts/surface"]
    checked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
