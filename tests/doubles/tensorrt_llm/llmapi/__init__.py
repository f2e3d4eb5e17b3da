"""Double of tensorrt_llm/llmapi: LLM with generate_async, RequestOutput, SamplingParams.

Signatures are those of tests/unittest/api_stability of TensorRT-LLM (1.x). Every call is a line of
JSON in ``TRTLLM_DOUBLE_JOURNAL``. A prompt ``slow`` takes a while for each token, ``boom`` breaks.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm.executor.utils import RequestError

EOS = 256
_KNOWN = frozenset(
    {
        *("trust_remote_code", "tensor_parallel_size", "dtype", "revision", "sampler_type"),
        *("pipeline_parallel_size", "max_batch_size", "max_input_len", "max_seq_len"),
        *("max_num_tokens", "max_beam_width", "kv_cache_config", "enable_chunked_prefill"),
        *("guided_decoding_backend", "scheduler_config"),
    }
)


def note(call: str, **values: Any) -> None:
    if path := os.environ.get("TRTLLM_DOUBLE_JOURNAL"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"call": call, **values}) + "\n")


@dataclass
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass
class SamplingParams:
    max_tokens: int = 32
    min_tokens: int | None = None
    end_id: int | None = None
    bad_token_ids: list[int] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    logprobs: int | None = None


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


class RequestOutput:
    """Iterated once a step; has all tokens so far, as TensorRT-LLM's has when it streams."""

    def __init__(self, request_id: int, prompt: list[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.outputs = [CompletionOutput()]
        self.finished = False
        self._params = params
        self._aborted = False

    def abort(self) -> None:
        note("abort", id=self.request_id)
        self._aborted = True

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        prompt = bytes(token for token in self.prompt_token_ids if token < EOS)
        await asyncio.sleep(0.1 if b"slow" in prompt else 0)
        if b"boom" in prompt:
            raise RuntimeError("CUDA error: it broke")
        completion, params = self.outputs[0], self._params
        made = len(completion.token_ids)
        over = made >= len(self.prompt_token_ids)
        token = EOS if over and not params.ignore_eos else self.prompt_token_ids[made % len(prompt)]
        completion.token_ids.append(token)
        if params.logprobs is not None:
            completion.logprobs.append({token: Logprob(-math.log(made + 2))})
        end = EOS if params.end_id is None else params.end_id
        if self._aborted:
            completion.finish_reason = "cancelled"
        elif token == end and not params.ignore_eos:
            completion.finish_reason = "stop"
        elif made + 1 >= params.max_tokens:
            completion.finish_reason = "length"
        self.finished = completion.finish_reason is not None
        return self


class LLM:
    def __init__(self, model: str, tokenizer: Any = None, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in _KNOWN:
                raise ValueError(f"{name}: Extra inputs are not permitted")
        note("LLM", model=model, **kwargs)
        self.max_num_tokens = kwargs.get("max_num_tokens") or 8192
        self._next = 0

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
    ) -> RequestOutput:
        params = sampling_params or SamplingParams()
        self._next += 1
        note("generate_async", id=self._next, params=asdict(params), streaming=streaming)
        if bytes(token for token in inputs if token < EOS) == b"refuse me":
            raise RequestError("the request cannot be served")
        return RequestOutput(self._next, inputs, params)

    def shutdown(self) -> None:
        note("shutdown")
