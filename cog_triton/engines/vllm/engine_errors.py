"""Coded errors of what vLLM raises, by the names of its exception classes."""

from __future__ import annotations

import logging
import re

from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    Overloaded,
    PromptTooLong,
    TritonUnavailable,
    VLLMUnknownError,
)

_log = logging.getLogger(__name__)

_REFUSALS = ("builtins:ValueError", "builtins:TypeError", "vllm.exceptions:VLLMClientError")
_WRAPPER = "vllm.v1.engine.exceptions:EngineGenerateError"
_DEAD = "vllm.v1.engine.exceptions:EngineDeadError"
_OVERLOADED = (
    "vllm.exceptions:QueueOverflowError",
    "vllm.exceptions:MaxQueuedTokensError",
    "vllm.exceptions:RetryableRequestError",
)
_PROMPT_TOO_LONG = re.compile(
    r"longer than the maximum model length|model's maximum context length"
)


def is_refusal(error: BaseException) -> bool:
    """Whether vLLM refuses what it was given, rather than failing at it."""
    return not _names(error).isdisjoint(_REFUSALS)


def coded_error(error: Exception) -> CogTritonError:
    """The coded error of what vLLM raised for one request."""
    if isinstance(error, CogTritonError):
        return error
    names = _names(error)
    if _WRAPPER in names and isinstance(error.__cause__, Exception):
        return coded_error(error.__cause__)
    if _DEAD in names:
        return TritonUnavailable(f"vLLM's engine is dead: {error}")
    if not names.isdisjoint(_OVERLOADED):
        return Overloaded(f"vLLM: {error}")
    if is_refusal(error):
        known = PromptTooLong if _PROMPT_TOO_LONG.search(str(error)) else InvalidArgument
        return known(str(error))
    _log.error("vLLM failed a request", exc_info=error)
    return VLLMUnknownError(f"{type(error).__name__}: {error}")


def _names(error: BaseException) -> set[str]:
    return {f"{cls.__module__}:{cls.__qualname__}" for cls in type(error).__mro__}
