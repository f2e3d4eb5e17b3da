"""Triton model ``vllm_model``: text in and out, with the tensors of Triton's vllm_backend.

The engine is the one that ``tensorrt_llm`` runs; vLLM encodes and decodes the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend
from cog_triton.backend.engine_model import Asked, EngineModel
from cog_triton.backend.text_inputs import Tensors
from cog_triton.backend.vllm_tensors import VLLMPart, parse_request
from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.host_messages import TextRequest
from cog_triton.text.prompt_encoder import WHOLE_BYTES, PromptEncoder


class TritonPythonModel(EngineModel):
    """One prompt a request; decoupled."""

    def setup(self, args: Mapping[str, str]) -> None:
        parameters = self.parameters
        self._types = types_of(parameters.text("vllm_version"))
        # vLLM encodes prompts itself, but all of one before it looks at the length.
        self._encoder = PromptEncoder(parameters.tokenizer(), parameters.count("max_input_len"))
        self._images = parameters.image_limits()
        self._embeds = parameters.flag("embeds")

    def takes_long(self, inputs: Tensors) -> bool:
        names = ("text_input", "embedding_request", "image")
        texts = [text for name in names if name in inputs for text in inputs[name].flat]
        return sum(map(len, texts)) > WHOLE_BYTES // 4

    def parse(self, asked: Asked) -> Sequence[VLLMPart]:
        parsed = parse_request(
            self.name,
            asked.inputs,
            asked.parameters,
            self._types,
            takes_images=self._images is not None,
            encode=self._encoder.encode if self._embeds else None,
        )
        if isinstance(parsed.request, TextRequest):
            self._encoder.check(parsed.request.prompt)
        if self._images is not None and parsed.images:
            parsed = parsed.with_images(self._images)
        return [VLLMPart(parsed)]

    def failure(self, event: Any) -> Any:
        """See `EngineModel.failure`; texts are those of vllm_backend."""
        if event.error is not None:
            return python_backend.error_response(event.error, "Error generating stream: ")
        if event.finish == "cancelled":
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
            )
        return None
