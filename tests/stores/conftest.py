"""Packages and servers of stores for these tests, where scripts/setup-tools puts them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / ".work" / "tools"))
sys.path.append(str(Path(__file__).parents[1] / "unit"))  # its server of the API


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = ("azure", "moto", "obstore", "redis")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    for item in items if lacking else ():
        if Path(__file__).parent in item.path.parents:
            reason = f"no {', '.join(lacking)} here: run scripts/setup-tools"
            item.add_marker(pytest.mark.skip(reason=reason))
