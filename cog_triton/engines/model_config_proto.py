"""Protobuf messages of Triton's model configurations, as tritonclient has them.

They are loaded from its file: its package imports gRPC and NumPy, half a second of CPU at each
start of a server, which calls neither.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def _load(name: str) -> Any:
    """Module `name` of tritonclient.grpc, without what its packages import."""
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'tritonclient'", name="tritonclient")
    file = Path(package.submodule_search_locations[0], "grpc", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_tritonclient_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model_config_pb2 = _load("model_config_pb2")
