"""Error table of TensorRT-LLM's Triton backend: message patterns and their error codes.

A module of its own because the BLS model in Triton gets the same texts.

The backend reports every failed request as Triton's INTERNAL with the text of the exception
(`enqueue` in model_instance_state.cc), so only the text separates user errors from failures. Each
row names where it is thrown in TensorRT-LLM; `TLLM_CHECK` puts "Assertion failed: " in front.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    Overloaded,
    PromptRequired,
    PromptTooLong,
    TritonUnavailable,
)


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the error table; `detail` may use the pattern's groups by name, and ``text``."""

    pattern: str
    error: type[CogTritonError]
    source: str
    detail: str = "{text}"


_REQUESTS = (
    Row(
        r"Prompt length \((?P<length>\d+)\) exceeds maximum (?:input|sequence) length"
        r" \((?P<limit>\d+)\)",
        PromptTooLong,
        "LlmRequest::validate; 'sequence' before 0.10",
        "Prompt length ({length}) exceeds maximum input length ({limit})",
    ),
    Row(
        r"Encoder length \((?P<length>\d+)\) exceeds maximum encoder input length"
        r" \((?P<limit>\d+)\)",
        PromptTooLong,
        "LlmRequest::validate",
        "Prompt length ({length}) exceeds maximum encoder input length ({limit})",
    ),
    Row(r"Assertion failed: !mInputTokenIds\.empty\(\)", PromptRequired, "Request::validate",
        "input_ids is empty"),
    Row(r"Assertion failed: mMaxNewTokens > 0", InvalidArgument, "Request::validate",
        "request_output_len: must be at least 1"),
    Row(
        r"Maximum queue size of (?P<size>\d+) has been reached",
        Overloaded,
        "Executor::Impl::enqueueRequests",
        "{size} requests are waiting, as many as may (max_queue_size); try again later",
    ),
    Row(r"Exceeds maximum queue size", Overloaded, "Triton's scheduler",
        "as many requests are waiting as may (max_queue_size); try again later"),
    Row(r"Cache is full\. There are no done tasks to evict", Overloaded, "PeftCacheManager",
        "every LoRA adapter in the cache is in use; try again later"),
    Row(
        r"Assertion failed: (?P<name>topK|topP|topPMin|topPDecay|topPResetIds|temperature"
        r"|minTokens|minLength|beamSearchDiversityRate|repetition[pP]enalty|lengthPenalty"
        r"|earlyStopping|numReturnSequences|randomSeed)\.value\(\) (?P<rule>[<>]=? [\d.]+)f?",
        InvalidArgument,
        "SamplingConfig",
        "{name}: must be {rule}",
    ),
    Row(r"Assertion failed: beamWidth >|for beamWidth is invalid",
        InvalidArgument, "SamplingConfig; LlmRequest::validate",
        "beam_width: must be from 1 to the engine's max_beam_width"),
    Row(r"LoRA task (?P<id>\d+) not found in cache", InvalidArgument, "PeftCacheManager",
        "lora_task_id={id}: not loaded: send lora_weights and lora_config with it"),
    Row(r"GuidedDecodingParams, but GuidedDecoder is not setup", InvalidArgument,
        "Executor::Impl", "guided_decoding_guide_type: this server runs without"
        " guided_decoding_backend"),
    Row(r"Guided decoding does not support with beam search", InvalidArgument,
        "Request::validate", "guided_decoding_guide_type: cannot be used with beam_width above 1"),
    Row(r"request ID is not provided", InvalidArgument, "handleStopRequest",
        "stop=True: Trying to stop a request but request ID is not provided"),
    Row(r"CUDA runtime error|illegal memory access|Encountered an error in forward",
        TritonUnavailable, "Executor::Impl::forwardSync", "the engine failed on the GPU: {text}"),
    Row(r"stopped accepting new inference requests", TritonUnavailable,
        "Triton's scheduler", "Triton is stopping; try again"),
)  # fmt: skip

_START = (
    Row(
        r"generated on an incompatible device, expecting compute (?P<here>[\d.]+)"
        r" got compute (?P<engine>[\d.]+)",
        EngineIncompatible,
        "IRuntime::deserializeCudaEngine",
        "the engine was built for compute capability {engine}, this GPU has {here}: build the"
        " engine on such a GPU, or serve it on one of its own kind",
    ),
    Row(
        r"not compatible with this version of TensorRT(?:, expecting library version"
        r" (?P<here>[\d.]+\d) got (?P<engine>[\d.]*\d))?",
        EngineIncompatible,
        "IRuntime::deserializeCudaEngine",
        "the engine was built by TensorRT {engine}, here is {here}: build the engine anew, or serve"
        " it with the image of its release",
    ),
    Row(
        r"Version tag does not match\. Note: Current Version: (?P<here>\d+),"
        r" Serialized Engine Version: (?P<engine>\d+)",
        EngineIncompatible,
        "IRuntime::deserializeCudaEngine",
        "the engine was built by another TensorRT (serialization version {engine}, here {here}):"
        " build the engine anew",
    ),
    Row(
        r"(?P<what>tensor|pipeline|[Cc]ontext) parallelism mismatch",
        EngineIncompatible,
        "GptJsonConfig, WorldConfig",
        "{what} parallelism of the engine is not that of the processes: it needs a process for"
        " each rank (WORLD_SIZE)",
    ),
    Row(
        r"MPI worldSize is expected to be equal to tp\*pp",
        EngineIncompatible,
        "Executor::Impl::initializeWorkers",
        "the engine needs a process for each rank, and others were started (WORLD_SIZE)",
    ),
)

_INPUT_NAMES = {
    "topK": "runtime_top_k",
    "topP": "runtime_top_p",
    "topPMin": "runtime_top_p_min",
    "topPDecay": "runtime_top_p_decay",
    "topPResetIds": "runtime_top_p_reset_ids",
    "minTokens": "min_tokens",
    "minLength": "min_tokens",
    "randomSeed": "seed",
    "beamSearchDiversityRate": "beam_search_diversity_rate",
    "repetitionpenalty": "repetition_penalty",
    "repetitionPenalty": "repetition_penalty",
    "lengthPenalty": "len_penalty",
    "earlyStopping": "early_stopping",
    "numReturnSequences": "num_return_sequences",
}


def request_error(text: str) -> CogTritonError | None:
    """The coded error of a failed request's text, None if it is not known."""
    return _find(_REQUESTS, text)


def start_error(log: str) -> CogTritonError | None:
    """The coded error in Triton's log after a failed start, None if it is not known."""
    return _find(_START, log)


def _find(rows: tuple[Row, ...], text: str) -> CogTritonError | None:
    for row in rows:
        if match := re.search(row.pattern, text):
            found = {name: value or "another one" for name, value in match.groupdict().items()}
            if "name" in found:
                found["name"] = _INPUT_NAMES.get(found["name"], found["name"])
            return row.error(row.detail.format(text=text.strip(), **found))
    return None
