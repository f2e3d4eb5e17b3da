"""Triton model `postprocessing` of the original cog-triton: passes ids on, and adds four zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_BESIDE = {
    "OUT_CUM_LOG_PROBS": 2,
    "OUT_OUTPUT_LOG_PROBS": 3,
    "OUT_CONTEXT_LOGITS": 3,
    "OUT_GENERATION_LOGITS": 4,
}


class TritonPythonModel:
    """One response for each request."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Pass ids on; log probabilities and logits are zeros."""
        responses = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
            tensors = [pb_utils.Tensor("OUTPUT", ids)]
            tensors += [
                pb_utils.Tensor(name, np.zeros((1,) * rank, dtype=np.float32))
                for name, rank in _BESIDE.items()
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
