"""Double of vllm/outputs.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Any
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None
    weight_versions: list[Any] | None = None


class RequestOutput:
    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: Any,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: Any = None,
        lora_request: Any = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        num_cache_creation_tokens: int | None = None,
        *,
        prompt_token_id_logprobs: Any = None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.lora_request = lora_request
        self.num_cached_tokens = num_cached_tokens

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        self.finished |= next_output.finished
        for new in next_output.outputs:
            old = next((o for o in self.outputs if o.index == new.index), None)
            if old is None:
                self.outputs.append(new)
            elif not aggregate:
                self.outputs[self.outputs.index(old)] = new
            else:
                old.text += new.text
                old.token_ids = [*old.token_ids, *new.token_ids]
                if new.logprobs:
                    old.logprobs = [*old.logprobs, *new.logprobs]
                old.cumulative_logprob = new.cumulative_logprob
                old.finish_reason = new.finish_reason
                old.stop_reason = new.stop_reason


Output = TypeVar("Output")


@dataclass
class PoolingOutput:
    data: Any


class PoolingRequestOutput(Generic[Output]):
    def __init__(
        self,
        request_id: str,
        outputs: Output,
        prompt_token_ids: list[int],
        num_cached_tokens: int,
        finished: bool,
        *,
        error: Any = None,
        late_chunking: Any = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.finished = finished
        self.outputs = outputs
        self.error = error


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> "EmbeddingOutput":
        if pooling_output.data.ndim != 1:
            raise ValueError("pooled_data should be a 1-D embedding vector")
        return EmbeddingOutput(pooling_output.data.tolist())


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    @staticmethod
    def from_base(request_output: PoolingRequestOutput) -> "EmbeddingRequestOutput":
        return EmbeddingRequestOutput(
            request_output.request_id,
            EmbeddingOutput.from_base(request_output.outputs),
            request_output.prompt_token_ids,
            0,
            request_output.finished,
        )
