"""Pooling model of the double: an embedding tells the prompt's length and its first bytes."""

from __future__ import annotations

import numpy as np

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

NOT_A_NUMBER = 255
"""A token in a prompt that makes the embedding one of NaN."""


class Pooled:
    """One request, which a single step answers."""

    def __init__(self, request: Request, size: int) -> None:
        self._request = request
        self._size = request.pooling_params.dimensions or size

    def is_ready(self) -> bool:
        """It waits for no grammar."""
        return True

    def step(self) -> EngineCoreOutput:
        """Make the embedding, in vLLM a tensor: of length 1, as most models normalize it."""
        ids = self._request.prompt_token_ids
        numbers = np.zeros(self._size, np.float32)
        told = [len(ids), *ids][: self._size]
        numbers[: len(told)] = told
        numbers /= np.linalg.norm(numbers)
        if NOT_A_NUMBER in ids:
            numbers[:] = np.nan
        return EngineCoreOutput(
            self._request.request_id, [], finish_reason=FinishReason.STOP, pooling_output=numbers
        )
