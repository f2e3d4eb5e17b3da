"""Helm and Kubernetes' schemas for these tests, from where scripts/setup-tools puts them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / ".work" / "tools"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = ("compose_spec", "helm_python", "jsonschema", "kubernetes_validate")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    for item in items if lacking else ():
        if Path(__file__).parent in item.path.parents:
            reason = f"no {', '.join(lacking)} here: run scripts/setup-tools"
            item.add_marker(pytest.mark.skip(reason=reason))
