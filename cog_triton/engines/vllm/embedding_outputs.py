"""Embedding outputs: vLLM's PoolingRequestOutput to events, as numbers or as their JSON text."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from cog_triton.engines.request import TokenEvent
from cog_triton.engines.vllm import engine_api
from cog_triton.engines.vllm.engine_outputs import aborted
from cog_triton.engines.vllm.host_messages import TextEvent
from cog_triton.errors import VLLMUnknownError


class EmbeddingConverter:
    """Converts the only output of an embedding request to its only event."""

    def __init__(self, *, as_text: bool) -> None:
        """With `as_text` the event is a `TextEvent`, as ``vllm_model`` gets it."""
        self._as_text = as_text

    def prompt_event(self, output: Any) -> None:
        """None: there is nothing of the prompt."""

    def convert(self, output: Any) -> TokenEvent | TextEvent:
        """The event for `output`; raises E2105 if vLLM aborted it, E2200 for NaN and infinity."""
        embedding = engine_api.embedding(output)
        if not embedding:
            raise aborted()
        if not all(map(isfinite, embedding)):
            raise VLLMUnknownError("vLLM's embedding has numbers that are not finite")
        if not self._as_text:
            return TokenEvent([], [], "stop", embedding=embedding)
        return TextEvent(
            texts=[json.dumps(embedding)],
            finish_reasons=["stop"],
            cumulative_logprobs=[float("nan")],
            logprobs=["null"],
            output_token_counts=[0],
            input_token_count=len(output.prompt_token_ids),
            finish="stop",
        )
