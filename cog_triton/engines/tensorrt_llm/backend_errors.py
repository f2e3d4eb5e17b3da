"""Error table of TensorRT-LLM's Triton backend: message patterns and their error codes.

A module of its own because the BLS model in Triton gets the same texts.

The backend reports every failed request as Triton's INTERNAL with the text of the exception
(`enqueue` in model_instance_state.cc), so only the text separates user errors from failures. Each
row ends with where it is thrown in TensorRT-LLM; `TLLM_CHECK` puts "Assertion failed: " in front.
"""

from __future__ import annotations

import re

from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    Overloaded,
    PromptRequired,
    PromptTooLong,
    TritonUnavailable,
)

Rows = tuple[tuple[str, type[CogTritonError], str], ...]
"""Pattern, error and its text, which may use the pattern's groups by name, and ``text``."""

# fmt: off
_REQUESTS: Rows = (
    # LlmRequest::validate; 'sequence' before 0.10
    (r"Prompt length \((?P<length>\d+)\) exceeds maximum (?:input|sequence) length"
     r" \((?P<limit>\d+)\)",
     PromptTooLong, "Prompt length ({length}) exceeds maximum input length ({limit})"),
    (r"Encoder length \((?P<length>\d+)\) exceeds maximum encoder input length"
     r" \((?P<limit>\d+)\)",
     PromptTooLong, "Prompt length ({length}) exceeds maximum encoder input length ({limit})"),
    # Request::validate
    (r"Assertion failed: !mInputTokenIds\.empty\(\)", PromptRequired, "input_ids is empty"),
    (r"Assertion failed: mMaxNewTokens > 0", InvalidArgument,
     "request_output_len: must be at least 1"),
    (r"Guided decoding does not support with beam search", InvalidArgument,
     "guided_decoding_guide_type: cannot be used with beam_width above 1"),
    # Executor::Impl::enqueueRequests, Triton's scheduler, PeftCacheManager
    (r"Maximum queue size of (?P<size>\d+) has been reached", Overloaded,
     "{size} requests are waiting, as many as may (max_queue_size); try again later"),
    (r"Exceeds maximum queue size", Overloaded,
     "as many requests are waiting as may (max_queue_size); try again later"),
    (r"Cache is full\. There are no done tasks to evict", Overloaded,
     "every LoRA adapter in the cache is in use; try again later"),
    # SamplingConfig; LlmRequest::validate
    (r"Assertion failed: (?P<name>topK|topP|topPMin|topPDecay|topPResetIds|temperature|minTokens"
     r"|minLength|beamSearchDiversityRate|repetition[pP]enalty|lengthPenalty|earlyStopping"
     r"|numReturnSequences|randomSeed)\.value\(\) (?P<rule>[<>]=? [\d.]+)f?",
     InvalidArgument, "{name}: must be {rule}"),
    (r"Assertion failed: beamWidth >|for beamWidth is invalid", InvalidArgument,
     "beam_width: must be from 1 to the engine's max_beam_width"),
    # PeftCacheManager, Executor::Impl, handleStopRequest
    (r"LoRA task (?P<id>\d+) not found in cache", InvalidArgument,
     "lora_task_id={id}: not loaded: send lora_weights and lora_config with it"),
    (r"GuidedDecodingParams, but GuidedDecoder is not setup", InvalidArgument,
     "guided_decoding_guide_type: this server runs without guided_decoding_backend"),
    (r"request ID is not provided", InvalidArgument,
     "stop=True: Trying to stop a request but request ID is not provided"),
    # Executor::Impl::forwardSync, Triton's scheduler
    (r"CUDA runtime error|illegal memory access|Encountered an error in forward",
     TritonUnavailable, "the engine failed on the GPU: {text}"),
    (r"stopped accepting new inference requests", TritonUnavailable,
     "Triton is stopping; try again"),
)

_START: Rows = (
    # IRuntime::deserializeCudaEngine
    (r"generated on an incompatible device, expecting compute (?P<here>[\d.]+)"
     r" got compute (?P<engine>[\d.]+)", EngineIncompatible,
     "the engine was built for compute capability {engine}, this GPU has {here}: build the"
     " engine on such a GPU, or serve it on one of its own kind"),
    (r"not compatible with this version of TensorRT(?:, expecting library version"
     r" (?P<here>[\d.]+\d) got (?P<engine>[\d.]*\d))?", EngineIncompatible,
     "the engine was built by TensorRT {engine}, here is {here}: rebuild the engine, or serve"
     " it with the image of its release"),
    (r"Version tag does not match\. Note: Current Version: (?P<here>\d+),"
     r" Serialized Engine Version: (?P<engine>\d+)", EngineIncompatible,
     "the engine was built by another TensorRT (serialization version {engine}, here {here}):"
     " rebuild the engine"),
    # GptJsonConfig, WorldConfig; Executor::Impl::initializeWorkers
    (r"(?P<what>tensor|pipeline|[Cc]ontext) parallelism mismatch", EngineIncompatible,
     "{what} parallelism of the engine is not that of the processes: it needs a process for"
     " each rank (WORLD_SIZE)"),
    (r"MPI worldSize is expected to be equal to tp\*pp", EngineIncompatible,
     "the engine needs a process for each rank, and others were started (WORLD_SIZE)"),
)
# fmt: on

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


def _find(rows: Rows, text: str) -> CogTritonError | None:
    for pattern, error, detail in rows:
        if match := re.search(pattern, text):
            found = {name: value or "another one" for name, value in match.groupdict().items()}
            if "name" in found:
                found["name"] = _INPUT_NAMES.get(found["name"], found["name"])
            return error(detail.format(text=text.strip(), **found))
    return None
