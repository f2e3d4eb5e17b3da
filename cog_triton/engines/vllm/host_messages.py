"""What ``vllm_model`` and the host say to each other, besides requests in token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, TypeVar

from typing_extensions import Self

from cog_triton.errors import CogTritonError

T = TypeVar("T")


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

    @classmethod
    def coalesce(cls, events: Sequence[Self]) -> Self:
        """Events of one request that follow each other, at least one, as a single event."""
        last = events[-1]
        return cls(
            texts=["".join(parts) for parts in _by_output(event.texts for event in events)],
            finish_reasons=[
                next(filter(None, reasons), None)
                for reasons in _by_output(event.finish_reasons for event in events)
            ],
            cumulative_logprobs=[
                next((total for total in reversed(totals) if not isnan(total)), nan)
                for totals in _by_output(event.cumulative_logprobs for event in events)
            ],
            logprobs=[_one_list(parts) for parts in _by_output(event.logprobs for event in events)],
            output_token_counts=[
                sum(counts) for counts in _by_output(event.output_token_counts for event in events)
            ],
            input_token_count=last.input_token_count,
            finish=last.finish,
            error=last.error,
        )


def _by_output(events: Iterable[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """What each output has in all events, of what all outputs have in each."""
    return zip(*events, strict=True)


def _one_list(parts: Sequence[str]) -> str:
    """JSON lists as one; ``null`` if there are none. Made of text: parsing takes its time."""
    lists = [part for part in parts if part != "null"]
    return f"[{', '.join(part[1:-1] for part in lists if part != '[]')}]" if lists else "null"


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
