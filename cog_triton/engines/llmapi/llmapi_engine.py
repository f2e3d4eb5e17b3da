"""LLM API: every call into TensorRT-LLM 1.2 and later; the only module that imports it.

Imports are late: serving processes and Triton's stubs run without TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    InvalidPredictorConfig,
    PromptTooLong,
    TritonUnknownError,
)

_OLDEST = (1, 2)
_PENALTIES_SINCE = (1, 3)
_REFUSALS = ("builtins:ValueError", "builtins:TypeError")
_REQUEST_ERROR = "RequestError"
_PROMPT_TOO_LONG = re.compile(
    r"should not exceed max_num_tokens|exceeds? max_seq_len|exceeds maximum input length"
)


def open_engine(arguments: Mapping[str, Any]) -> Any:
    """Load `tensorrt_llm.LLM`; raises E1305 without it or by its version, E1202 for a refusal."""
    try:
        import tensorrt_llm
    except ImportError as error:
        raise EngineIncompatible(
            "llmapi.yaml: TensorRT-LLM cannot be imported in the engine's Python: name one that has"
            f" it as tensorrt_llm.args.engine_python: {error}"
        ) from error
    if (release := _release(tensorrt_llm.__version__)) < _OLDEST:
        raise EngineIncompatible(
            f"TensorRT-LLM {tensorrt_llm.__version__}: the LLM API is served from 1.2 on, not"
            f" {release[0]}.{release[1]}"
        )
    try:
        return tensorrt_llm.LLM(**arguments)
    except CogTritonError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidPredictorConfig(f"llmapi.yaml: TensorRT-LLM refuses it: {error}") from error


def heeds_penalties(arguments: Mapping[str, Any]) -> bool:
    """Whether the sampler heeds penalties: since 1.3, and before that TRTLLMSampler alone."""
    import tensorrt_llm

    chosen = arguments.get("sampler_type") == "TRTLLMSampler"
    return chosen or _release(tensorrt_llm.__version__) >= _PENALTIES_SINCE


def sampling_params(values: Mapping[str, Any]) -> Any:
    """SamplingParams of `values`, in which a guide is the arguments of its class; raises E1005."""
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.llmapi import GuidedDecodingParams

    made = dict(values)
    try:
        if (guide := made.get("guided_decoding")) is not None:
            made["guided_decoding"] = GuidedDecodingParams(**guide)
        return SamplingParams(**made)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"TensorRT-LLM refuses the request: {error}") from error


def coded_error(error: Exception) -> CogTritonError:
    """The coded error of what TensorRT-LLM raised for one request."""
    if isinstance(error, CogTritonError):
        return error
    names = {f"{cls.__module__}:{cls.__qualname__}" for cls in type(error).__mro__}
    if _PROMPT_TOO_LONG.search(str(error)):
        return PromptTooLong(str(error))
    if type(error).__name__ == _REQUEST_ERROR or not names.isdisjoint(_REFUSALS):
        return InvalidArgument(f"TensorRT-LLM refuses the request: {error}")
    return TritonUnknownError(f"TensorRT-LLM: {type(error).__name__}: {error}")


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
