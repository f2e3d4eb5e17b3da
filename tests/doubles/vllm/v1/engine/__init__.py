"""Double of vllm/v1/engine/__init__.py: what crosses between AsyncLLM and EngineCore."""

import enum
import time
from dataclasses import dataclass, field
from typing import Any, Literal

PauseMode = Literal["abort", "wait", "keep"]
FINISH_REASON_STRINGS = ("stop", "length", "abort", "error", "repetition")


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


@dataclass
class EngineCoreRequest:
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: Any
    arrival_time: float
    lora_request: Any = None
    external_req_id: str | None = None
    pooling_params: Any = None


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class EngineCoreOutputs:
    engine_index: int = 0
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: Any = None
    timestamp: float = field(default_factory=time.monotonic)
