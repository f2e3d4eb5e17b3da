"""Double of vllm/v1/engine/parallel_sampling.py."""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest


class ParentRequest:
    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.sampling_params = request.sampling_params
        self.child_requests: set[str] = set()
        self.output_aggregator: list[Any] = [None] * self.n

    @property
    def n(self) -> int:
        return self.sampling_params.n

    def get_child_info(self, index: int) -> tuple[str, Any]:
        name = f"{index}_{self.request_id}"
        self.child_requests.add(name)
        params = copy(self.sampling_params)
        params.n = 1
        return name, params

    def get_outputs(
        self, child_request_id: str, completion_output: CompletionOutput
    ) -> tuple[list[CompletionOutput], bool]:
        if completion_output.finish_reason is not None:
            self.child_requests.discard(child_request_id)
        finished = not self.child_requests
        if self.sampling_params.output_kind != RequestOutputKind.FINAL_ONLY:
            return [completion_output], finished
        self.output_aggregator[completion_output.index] = completion_output
        return self.output_aggregator if finished else [], finished
