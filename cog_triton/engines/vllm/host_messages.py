"""Messages between ``vllm_model`` and the vLLM host: text requests and what they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, Self

from cog_triton.errors import CogTritonError
from cog_triton.pictures.image_limits import ImagePart


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Text request: one prompt; `sampling` is from `sampling_arguments.from_client`.

    `images` are those whose placeholders are in the prompt, in their order.
    `return_logprobs` and `return_cumulative_logprob` request outputs besides the text.
    """

    prompt: str
    sampling: Mapping[str, Any]
    stream: bool = False
    return_logprobs: bool = False
    return_cumulative_logprob: bool = False
    images: tuple[ImagePart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvent:
    """New output of a request's `n` sequences; logprobs are JSON, ``null`` unless requested.

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
        """Coalesce consecutive events of one request, at least one, into a single event."""
        last = events[-1]

        def each(name: str) -> Iterator[tuple[Any, ...]]:
            return zip(*(getattr(event, name) for event in events), strict=True)

        return cls(
            texts=["".join(parts) for parts in each("texts")],
            finish_reasons=[next(filter(None, found), None) for found in each("finish_reasons")],
            cumulative_logprobs=[
                next((total for total in reversed(totals) if not isnan(total)), nan)
                for totals in each("cumulative_logprobs")
            ],
            logprobs=[_concatenated(parts) for parts in each("logprobs")],
            output_token_counts=[sum(counts) for counts in each("output_token_counts")],
            input_token_count=last.input_token_count,
            finish=last.finish,
            error=last.error,
        )


def _concatenated(parts: Sequence[str]) -> str:
    """Concatenate JSON lists as text, without parsing; ``null`` if there are none."""
    lists = [part for part in parts if part != "null"]
    return f"[{', '.join(part[1:-1] for part in lists if part != '[]')}]" if lists else "null"
