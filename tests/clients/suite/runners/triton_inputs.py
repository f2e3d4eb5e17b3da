"""What the runners of tritonclient share: servers, inputs, and the text of a result."""

from __future__ import annotations

from typing import Any

import numpy as np
from checks import server
from tritonclient.utils import np_to_triton_dtype

STREAMING = server("openvino")
WHOLE = server("whole")
PROMPT = "The capital of France is"
MODELS = ("ensemble", "tensorrt_llm_bls")


def inputs(kind: Any, **values: Any) -> list[Any]:
    """Inputs of shape [1, 1] as `kind`, tritonclient's http or grpc module, has them."""
    found = []
    types: dict[type, Any] = {str: np.object_, int: np.int32, float: np.float32, bool: np.bool_}
    for name, value in values.items():
        array = np.array([[value]], dtype=types[type(value)])
        tensor = kind.InferInput(name, [1, 1], np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def asked(kind: Any, size: int = 4, **values: Any) -> list[Any]:
    return inputs(kind, text_input=PROMPT, max_tokens=size, temperature=0.0, **values)


def text(result: Any) -> str:
    """The text output, as clients read it: bytes."""
    return result.as_numpy("text_output").flatten()[0].decode()
