"""Triton model ``tensorrt_llm`` of engines in processes: token ids in, token ids out.

Decoupled, every engine step becomes one response; else there is one in the end. Runs inside
Triton's stub process, so it imports little.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence, Set

import numpy as np

from cog_triton.backend.answers import Part, TokenOutputs
from cog_triton.backend.engine_model import Asked, EngineModel
from cog_triton.backend.request_metrics import RequestMetrics
from cog_triton.backend.text_inputs import Tensors
from cog_triton.engines import tensor_contract
from cog_triton.engines.base import REQUEST_DECODER
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import InvalidArgument
from cog_triton.system import process_tuning

_INDICES = frozenset({"batch_index", "sequence_index"})
"""Outputs that are 0: of the only prompt and sequence."""


class TokenPart(Part):
    """A request's tokens; without streaming they are kept until the last event."""

    def __init__(self, request: EngineRequest, indices: Set[str]) -> None:
        super().__init__(request)
        self.prompt_tokens = len(request.input_ids)
        self._indices = indices
        self._outputs = TokenOutputs(request)
        self._held: list[TokenEvent] = []

    def feed(self, event: TokenEvent) -> list[Tensors]:
        self.tokens = len(event.token_ids)
        if not self.request.streaming:
            self._held.append(event)
            if event.finish is None:
                return []
            event = TokenEvent.coalesce(self._held)
        ids = event.token_ids
        if not (ids or event.finish):
            return []
        if not (self.request.streaming or self.request.exclude_input_in_output):
            ids = [*self.request.input_ids, *ids]
        tensors: Tensors = {
            "output_ids": np.array([[ids]], np.int32),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if event.finish is not None:
            tensors[tensor_contract.FINISH_REASON] = np.array([[event.finish]], np.object_)
        tensors |= {name: np.zeros((1, 1), np.int32) for name in self._indices}
        return [tensors | self._outputs.of(event)]


class TritonPythonModel(EngineModel):
    """Owner of the engine's statistics, which it publishes."""

    role = "owner"

    def setup(self, args: Mapping[str, str]) -> None:
        """See `EngineModel.setup`; waits for the engine."""
        module, _, function = self.parameters.text(REQUEST_DECODER).partition(":")
        self._decode = getattr(importlib.import_module(module), function)
        self.engine.wait_until_linked()
        self._metrics = RequestMetrics(args, self.engine.stats)
        self.engine.on_kv_cache = self.changed = self._metrics.publish
        process_tuning.tune_for_serving()

    def parse(self, asked: Asked) -> Sequence[TokenPart]:
        tensor_contract.check_parameters(asked.parameters, self.parameters.inputs)
        request = self._decode(asked.inputs)
        if request.streaming and not self.decoupled:
            raise InvalidArgument(
                "streaming=True: Streaming is only supported if model is deployed using decoupled"
                " mode: tensorrt_llm.args.decoupled_mode"
            )
        # Who names no outputs does without indices.
        named = len(asked.outputs) < len(self.parameters.outputs)
        return [TokenPart(request, _INDICES & {*asked.outputs} if named else frozenset())]

    def finalize(self) -> None:
        super().finalize()
        self._metrics.close()
