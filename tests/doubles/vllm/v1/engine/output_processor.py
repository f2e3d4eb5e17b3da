"""Double of vllm/v1/engine/output_processor.py; VLLM_DOUBLE_INTERFACE=other has another one."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.loggers import IterationStats


class RequestOutputCollector:
    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.aggregate = output_kind == RequestOutputKind.DELTA
        self.request_id = request_id
        self.output: RequestOutput | Exception | None = None
        self.ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        if self.output is None or isinstance(output, Exception):
            self.output = output
            self.ready.set()
        elif isinstance(self.output, RequestOutput):
            self.output.add(output, aggregate=self.aggregate)

    async def get(self) -> RequestOutput:
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | None:
        output, self.output = self.output, None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output

    def close(self) -> None:
        pass


@dataclass
class OutputProcessorOutput:
    request_outputs: list[RequestOutput]
    reqs_to_abort: list[str]


class RequestState:
    def __init__(
        self, request: EngineCoreRequest, prompt: str | None, parent: ParentRequest | None,
        index: int, queue: RequestOutputCollector | None, tokenizer: Any,
    ) -> None:  # fmt: skip
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.pools = request.pooling_params is not None
        self.params = request.pooling_params if self.pools else request.sampling_params
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.parent_req = parent
        self.request_index = index
        self.queue = queue
        self.tokenizer = None if self.pools or not self.params.detokenize else tokenizer
        self.token_ids: list[int] = []
        self.text = ""
        self.sent_length = 0
        self.logprobs: list[Any] | None = None
        self.prompt_logprobs: list[Any] | None = None
        if not self.pools:
            self.logprobs = None if self.params.logprobs is None else []
            self.prompt_logprobs = None if self.params.prompt_logprobs is None else []

    def update(self, output: EngineCoreOutput) -> str | None:
        """Take an output's tokens; returns the stop string that they complete."""
        self.token_ids += output.new_token_ids
        self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs = output.new_prompt_logprobs_tensors or self.prompt_logprobs
        if self.logprobs is not None:
            self.logprobs += output.new_logprobs
        if self.tokenizer is None:
            return None
        text = str(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))
        if output.finished or not text.endswith("\ufffd"):
            self.text = text
        for stop in self.params.stop if len(self.token_ids) > self.params.min_tokens else ():
            if stop in text:
                self.text = text[: text.index(stop)]
                return stop
        return None

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
    ) -> RequestOutput | PoolingRequestOutput | None:
        if pooling_output is not None:
            return PoolingRequestOutput(
                self.external_req_id,
                PoolingOutput(pooling_output),
                self.prompt_token_ids,
                0,
                finish_reason is not None,
            )
        delta = self.params.output_kind == RequestOutputKind.DELTA
        finished = finish_reason is not None
        if not finished and not delta:
            return None
        token_ids, text, logprobs = self.token_ids, self.text, self.logprobs
        if delta:
            token_ids, text = list(new_token_ids), text[self.sent_length :]
            logprobs = logprobs and logprobs[-len(token_ids) :]
            self.sent_length = len(self.text)
        total = self.logprobs and sum(next(iter(p.values())).logprob for p in self.logprobs)
        output = CompletionOutput(
            self.request_index, text, token_ids, total, logprobs, None,
            str(finish_reason) if finished else None, stop_reason,
        )  # fmt: skip
        outputs = [output]
        if self.parent_req is not None:
            outputs, finished = self.parent_req.get_outputs(self.request_id, output)
            if not outputs:
                return None
        of_prompt = self.prompt_logprobs
        if delta and of_prompt:
            self.prompt_logprobs = []
        return RequestOutput(
            self.external_req_id, self.prompt, self.prompt_token_ids, of_prompt, outputs, finished,
            num_cached_tokens=self.num_cached_tokens,
        )  # fmt: skip


class OutputProcessor:
    def __init__(
        self, tokenizer: Any, *, log_stats: bool, stream_interval: int = 1,
        tracing_enabled: bool = False, admission_stats: Any = None,
    ) -> None:  # fmt: skip
        self.log_stats = log_stats
        self.tokenizer = tokenizer
        self.request_states: dict[str, RequestState] = {}
        self.external_req_ids: defaultdict[str, list[str]] = defaultdict(list)

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def propagate_error(self, e: Exception) -> None:
        for state in self.request_states.values():
            state.queue.put(e)

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        aborted = []
        for name in request_ids:
            for internal_id in [name] if internal else list(self.external_req_ids[name]):
                if (state := self.request_states.get(internal_id)) is None:
                    children = f"_{internal_id}"
                    family = [i for i in self.request_states if i.endswith(children)]
                    aborted += self.abort_requests(family, internal=True) if family else []
                    continue
                self._finish_request(state)
                aborted.append(internal_id)
                empty = np.empty(0, np.float32) if state.pools else None
                output = state.make_request_output([], empty, FinishReason.ABORT, None)
                if state.queue is not None and output is not None:
                    state.queue.put(output)
        return aborted

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None,
        parent_req: ParentRequest | None = None, request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:  # fmt: skip
        state = RequestState(request, prompt, parent_req, request_index, queue, self.tokenizer)
        self.request_states[request.request_id] = state
        self.external_req_ids[state.external_req_id].append(request.request_id)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        reqs_to_abort = []
        for engine_core_output in engine_core_outputs:
            state = self.request_states.get(engine_core_output.request_id)
            if state is None:
                continue
            reason, stop_reason = engine_core_output.finish_reason, engine_core_output.stop_reason
            if stop_string := state.update(engine_core_output):
                reason, stop_reason = FinishReason.STOP, stop_string
            if output := state.make_request_output(
                engine_core_output.new_token_ids,
                engine_core_output.pooling_output,
                reason,
                stop_reason,
            ):
                state.queue.put(output)
            if reason is not None:
                self._finish_request(state)
                if not engine_core_output.finished:
                    reqs_to_abort.append(state.request_id)
        return OutputProcessorOutput([], reqs_to_abort)

    def update_scheduler_stats(self, scheduler_stats: Any) -> None:
        pass

    def _finish_request(self, state: RequestState) -> None:
        self.request_states.pop(state.request_id)
        internal_ids = self.external_req_ids[state.external_req_id]
        internal_ids.remove(state.request_id)
        if not internal_ids:
            del self.external_req_ids[state.external_req_id]


if os.environ.get("VLLM_DOUBLE_INTERFACE") == "other":
    del OutputProcessor.update_scheduler_stats
