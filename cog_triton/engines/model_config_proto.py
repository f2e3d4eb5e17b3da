"""Protobuf messages of Triton's model configurations and gRPC service, as tritonclient has them.

They are loaded from its files: its package imports NumPy, 0.1 s of CPU at each start of a server.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
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


def service() -> Any:
    """Messages of the gRPC service; their file imports the package for `model_config_pb2`."""
    package = "tritonclient.grpc"
    if package in sys.modules:
        return _load("service_pb2")
    sys.modules[package] = stand_in = ModuleType(package)
    stand_in.__dict__["model_config_pb2"] = model_config_pb2
    try:
        return _load("service_pb2")
    finally:
        del sys.modules[package]
