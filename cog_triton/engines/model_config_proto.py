"""Protobuf messages of Triton's model configurations and gRPC service, as tritonclient has them.

They are loaded from its files: its package imports NumPy, 0.1 s of CPU at each start of a server.
The config of ``tensorrt_llm`` is a template with variables, as NVIDIA's are: ``${name}``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import text_format
from google.protobuf.text_format import ParseError as ParseError

_VARIABLE = re.compile(r"\$\{(\w+)\}")
TEMPLATE_DEFAULTS = {
    "triton_backend": "tensorrtllm",
    "triton_max_batch_size": "64",
    "decoupled_mode": "true",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "logits_datatype": "TYPE_FP32",
    "prompt_embedding_table_data_type": "TYPE_FP16",
    "encoder_input_features_data_type": "TYPE_FP16",
}
"""Values of the variables without which the config is not valid."""


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


def variables(template: str) -> set[str]:
    """The names of the variables of a template."""
    return set(_VARIABLE.findall(template))


def parse(template: str, values: Mapping[str, str]) -> Any:
    """The ModelConfig of a template with `values`; a variable without one stays, in quotes.

    Raises ParseError for a value that is of no use in its place.
    """

    def put(variable: re.Match[str]) -> str:
        value = values.get(variable[1])
        return variable[0] if value is None else json.dumps(value, ensure_ascii=False)[1:-1]

    return text_format.Parse(_VARIABLE.sub(put, template), model_config_pb2.ModelConfig())


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
