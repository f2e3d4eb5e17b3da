"""LLM API host process: runs `tensorrt_llm.LLM` for the Triton model ``tensorrt_llm``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from cog_triton.engines.async_loop import AsyncEngine
from cog_triton.engines.llmapi import llmapi_engine
from cog_triton.engines.llmapi.llmapi_directory import LLMAPIModel, read_model
from cog_triton.engines.llmapi.llmapi_sampling import OutputConverter, from_engine_request
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.request_checks import check_prompt
from cog_triton.errors import CogTritonError, TritonUnknownError

_log = logging.getLogger(__name__)


class LLMAPIHost(AsyncEngine):
    """LLM API host: one engine for every client; run by `cog_triton.backend.engine_process`."""

    def __init__(self, model: LLMAPIModel) -> None:
        super().__init__()
        self._model = model
        self._engine = llmapi_engine.open_engine(model.arguments)
        self._penalties = llmapi_engine.heeds_penalties(model.arguments)
        self.max_batch_size = model.max_batch_size
        self._outputs: dict[int, Any] = {}
        """TensorRT-LLM's RequestOutput of each request that is in the engine."""

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Load the engine that a rendered model's parameters describe."""
        return cls(read_model(Path(parameters["engine_dir"])))

    async def start(self, number: int, request: EngineRequest) -> None:
        """See `AsyncEngine.start`."""
        model = self._model
        check_prompt(request, max_seq_len=model.max_seq_len, max_input_len=model.max_input_len)
        values = from_engine_request(request, penalties=self._penalties)
        params = llmapi_engine.sampling_params(values)
        converter = OutputConverter(request, model.end_ids)
        outputs = self._engine.generate_async(list(request.input_ids), params, streaming=True)
        self._outputs[number] = outputs
        try:
            async for output in outputs:
                if (event := converter.convert(output)) is not None:
                    self.emit(number, event)
                if not self.server.runs(number):
                    if not output.finished:  # at a stop word
                        self.abort(number)
                    return
        finally:
            self._outputs.pop(number, None)
        raise TritonUnknownError("TensorRT-LLM ended the request without a reason")

    def abort(self, number: int) -> None:
        """See `AsyncEngine.abort`."""
        if (output := self._outputs.pop(number, None)) is not None:
            output.abort()

    def coded_error(self, error: Exception) -> CogTritonError:
        """See `AsyncEngine.coded_error`."""
        coded = llmapi_engine.coded_error(error)
        if isinstance(coded, TritonUnknownError):
            _log.error("TensorRT-LLM failed a request", exc_info=error)
        return coded

    def shutdown(self, *, ordered: bool) -> None:
        """See `AsyncEngine.shutdown`."""
        self._engine.shutdown()
