"""Triton model ``postprocessing``: decodes token ids, each response by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cog_triton.backend import python_backend, triton_log


class TritonPythonModel:
    """One response for each request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; raises E2102 or E1202, which ends tritonserver."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        self._tokenizer = parameters.tokenizer().tokenizer
        self._skip_special_tokens = parameters.flag("skip_special_tokens")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Decode TOKENS_BATCH [batch, beam, n] up to SEQUENCE_LENGTH [batch, beam]."""
        return [self._decode(python_backend.input_tensors(request)) for request in requests]

    def _decode(self, tensors: Mapping[str, Any]) -> Any:
        tokens, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
        rows = tokens.reshape(lengths.size, -1).tolist()
        texts = self._tokenizer.decode_batch(
            [row[:length] for row, length in zip(rows, lengths.ravel().tolist(), strict=True)],
            skip_special_tokens=self._skip_special_tokens,
        )
        output = np.array([text.encode() for text in texts], dtype=object)
        return python_backend.response({"OUTPUT": output.reshape(lengths.shape)})
