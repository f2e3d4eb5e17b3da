"""Double of vllm/v1/request.py: a request as EngineCore's scheduler has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreRequest


@dataclass
class StructuredOutputRequest:
    params: Any
    grammar: Any = None
    reasoning_ended: bool | None = None


class Request:
    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.sampling_params = request.sampling_params
        self.pooling_params = request.pooling_params
        self.output_token_ids: list[int] = []
        self.num_preemptions = self.num_cached_tokens = 0
        self.prefill_stats: Any = object()
        self.structured_output_request: StructuredOutputRequest | None = None
        if request.sampling_params and request.sampling_params.structured_outputs:
            params = request.sampling_params.structured_outputs
            self.structured_output_request = StructuredOutputRequest(params)

    @classmethod
    def from_engine_core_request(
        cls, request: EngineCoreRequest, block_hasher: Callable[[Request], list[Any]] | None
    ) -> Request:
        return cls(request)

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        self.output_token_ids += [token_ids] if isinstance(token_ids, int) else token_ids

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def use_structured_output(self) -> bool:
        return self.structured_output_request is not None
