"""What ``vllm_model`` and the host say to each other, besides requests in token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cog_triton.errors import CogTritonError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One prompt to generate from, in text; `sampling` as `sampling.from_client` made it.

    `return_logprobs` and `return_cumulative_logprob` ask for more than the text.
    """

    prompt: str
    sampling: Mapping[str, Any]
    stream: bool = False
    return_logprobs: bool = False
    return_cumulative_logprob: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvent:
    """What is new of each of a request's `n` outputs; logprobs are JSON, ``null`` if not asked.

    `finish` or `error` is set on a request's last event only.
    """

    texts: list[str]
    finish_reasons: list[str | None]
    cumulative_logprobs: list[float]
    logprobs: list[str]
    output_token_counts: list[int]
    input_token_count: int
    finish: str | None = None
    error: CogTritonError | None = None


# Metrics that tell of now; of the others, some add up (..._total) and some have many values.
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True, slots=True)
class MetricsRequest:
    """Asks for the measurements since the last one that asked."""


@dataclass(frozen=True, slots=True)
class MetricsEvent:
    """Values to add to each counter, to set each gauge to or to observe in each histogram, by
    Triton's metric name.
    """

    values: Mapping[str, list[float]]
    finish: str | None = "stop"
    error: CogTritonError | None = None
