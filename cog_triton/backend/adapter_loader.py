"""Triton model ``lora_loader``: gives TensorRT-LLM's backend the weights of a LoRA adapter, once.

Weights are FP16, which Triton's JSON does not carry, so our front end cannot send them. It names an
adapter here; requests then have its lora_task_id alone. Private to our front end.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.triton_engine import ModelRequest, TritonEngine
from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry
from cog_triton.engines.tensor_contract import LORA_NAME, scalar
from cog_triton.engines.tensorrt_llm.adapter_modules import task_id
from cog_triton.engines.tensorrt_llm.adapter_tensors import load_tensors
from cog_triton.errors import CogTritonError

_log = logging.getLogger(__name__)
_MODEL = "tensorrt_llm"


class TritonPythonModel:
    """Loads one adapter at a time."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read where the registry is."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        self._registry = AdapterRegistry(Path(parameters.text(REGISTRY)))
        self._engine = TritonEngine(_MODEL)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Make a token with each adapter and its weights; answers the lora_task_id."""
        responses = []
        for request in requests:
            try:
                name = scalar(LORA_NAME, python_backend.input_tensors(request)[LORA_NAME])
                responses.append(self._load(name.decode("utf-8", "replace")))
            except CogTritonError as error:
                responses.append(python_backend.error_response(error))
        return responses

    def _load(self, name: str) -> Any:
        adapter = self._registry.find(name)
        number = np.array([[task_id(adapter.number)]], np.uint64)
        inputs = {
            "input_ids": np.zeros((1, 1), np.int32),
            "input_lengths": np.ones((1, 1), np.int32),
            "request_output_len": np.ones((1, 1), np.int32),
            "streaming": np.zeros((1, 1), np.bool_),
            "lora_task_id": number,
            **load_tensors(adapter.directory),
        }
        request = ModelRequest(f"lora-{uuid.uuid4().hex}", inputs, ())
        for _ in self._engine.call(request):
            pass
        _log.info("LoRA adapter %r is in the engine's cache", name)
        return python_backend.response({"lora_task_id": number[0]})
