"""Tensors of NVIDIA's clients: gRPC inputs from plain values, with the types of each release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

TYPES: dict[type, Any] = {bool: np.bool_, int: np.int32, float: np.float32, str: np.object_}


def to_input(name: str, value: Any) -> grpcclient.InferInput:
    """An input of shape [1, n] or, of an array, its own; lists of text are words."""
    if not isinstance(value, np.ndarray):
        items = value if isinstance(value, list) else [value]
        raw = [item.encode() if isinstance(item, str) else item for item in items]
        value = np.array([raw], dtype=TYPES[type(items[0])])
    tensor = grpcclient.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value)
    return tensor


def to_inputs(values: Mapping[str, Any]) -> list[grpcclient.InferInput]:
    """Inputs by name; None is one that is not sent."""
    return [to_input(name, value) for name, value in values.items() if value is not None]


def to_outputs(names: Iterable[str]) -> list[grpcclient.InferRequestedOutput] | None:
    """Outputs to ask for; none asks for all."""
    return [grpcclient.InferRequestedOutput(name) for name in names] or None
