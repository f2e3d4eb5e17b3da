"""Engine request and token events: input and output of every engine, in token ids.

What a request may ask beyond the tensor contract only our own front end can ask, so that the
published model has TensorRT-LLM's inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, Self

from cog_triton import errors
from cog_triton.errors import InvalidArgument, PromptTooLong
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.system.log_notes import log_once
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams, row, rows

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Generation request: one prompt in token ids.

    `end_id` None means the engine's own end-of-sequence ids, -1 none at all.
    `stop_words` are token id sequences that end the output and are cut from it, `bad_words`
    such that are never generated. `guide` is what the output must match.
    With `return_log_probs`, `top_log_probs` likeliest tokens are told beside each token, and with
    `prompt_log_probs` those of the prompt's tokens, too.
    `adapter` is the name of a LoRA adapter of the `AdapterRegistry`. `images` are those whose
    placeholders are in `input_ids`, in their order; the engine puts their tokens there.
    With `embeds` the answer is the prompt's embedding, of the model's own size or of `dimensions`
    numbers.
    `made` are output tokens already, of a generation whose engine died, for an engine that takes
    them; all else is as it was asked, and what follows them is told.
    `priority` is for an engine whose scheduler heeds it: lower is earlier.
    """

    input_ids: Sequence[int]
    sampling: SamplingParams
    end_id: int | None = row(None)
    pad_id: int | None = row(None)
    stop_words: tuple[tuple[int, ...], ...] = row((), tensor="stop_words_list")
    bad_words: tuple[tuple[int, ...], ...] = row((), tensor="bad_words_list")
    guide: Guide | None = None
    adapter: str | None = None
    images: tuple[ImagePart, ...] = ()
    streaming: bool = row(True)
    exclude_input_in_output: bool = row(False)
    return_log_probs: bool = row(False)
    top_log_probs: int = row(0, tensor="")
    prompt_log_probs: bool = row(False, tensor="")
    embeds: bool = row(False, tensor="")
    dimensions: int | None = row(None, tensor="")
    made: Sequence[int] = row((), tensor="")
    priority: int = row(0, tensor="")
    return_num_input_tokens: bool = row(False)
    return_num_output_tokens: bool = row(False)

    @property
    def log_prob_width(self) -> int:
        """Log probabilities of one token: its own and those of the likeliest."""
        return 1 + self.top_log_probs if self.return_log_probs else 0

    @property
    def echoed(self) -> Sequence[int]:
        """Tokens of the prompt whose log probabilities are told: all of them, or none."""
        return self.input_ids if self.prompt_log_probs else ()

    def end_ids(self, defaults: Set[int]) -> Set[int]:
        """The ids that end the output; `defaults` are the engine's own."""
        if self.end_id is None:
            return defaults
        return frozenset([self.end_id] if self.end_id >= 0 else [])

    def as_prompt(self) -> Self:
        """The request for what is left to make, whose prompt ends in the tokens `made`.

        What counts output alone begins anew in it, and so do draws: the same seed would repeat the
        first ones.
        """
        if not (count := len(self.made)):
            return self
        sampling = self.sampling
        return replace(
            self,
            input_ids=[*self.input_ids, *self.made],
            made=(),
            sampling=replace(
                sampling,
                max_tokens=sampling.max_tokens - count,
                min_tokens=max(0, sampling.min_tokens - count),
                seed=resumed_seed(sampling.seed, count),
            ),
        )


_SEED_STEP = 0x9E3779B97F4A7C15  # the golden ratio's, as SplitMix64 has it: offsets differ widely


def resumed_seed(seed: int, made: int) -> int:
    """Random seed after `made` tokens, where an engine cannot go on with its draws."""
    return (seed + made * _SEED_STEP) % 2**63


REQUEST = rows(EngineRequest)
"""Fields that are values of their own; prompt, guide, adapter and images have codecs."""


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one request; `finish` or `error` is set on its last event only.

    `log_probs` holds the request's `log_prob_width` values a token, the token's own first, and
    `alternatives` the ids of the others. With `of_prompt` the tokens are those of the prompt,
    which come before all others; the first one's values mean nothing. An event of the prompt
    without tokens says how many it has with those of its images, `prompt_length`, or how many of
    them were in the engine's KV cache, `cached_tokens`, which may come with tokens, too.
    An `embedding` comes alone, with the `finish`.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish: FinishReason | None = None
    error: errors.CogTritonError | None = None
    alternatives: Sequence[int] = ()
    of_prompt: bool = False
    prompt_length: int = 0
    cached_tokens: int = 0
    embedding: Sequence[float] = ()

    @classmethod
    def coalesce(cls, events: Sequence[Self]) -> Self:
        """Coalesce consecutive events of one request, at least one, into a single event."""
        last = events[-1]
        if len(events) == 1:
            return last
        return cls(
            [token for event in events for token in event.token_ids],
            [value for event in events for value in event.log_probs],
            last.finish,
            last.error,
            [token for event in events for token in event.alternatives],
        )


_log = logging.getLogger(__name__)


def check_prompt(
    request: EngineRequest,
    *,
    max_seq_len: int,
    max_input_len: int | None = None,
    vocab_size: int | None = None,
) -> None:
    """Raise E1005 for token ids that the model does not have, E1002 for lengths beyond a limit."""
    ids = [*request.input_ids, *request.made]
    size, max_tokens = len(request.input_ids), request.sampling.max_tokens
    if not size:
        raise InvalidArgument("input_ids: empty; at least one token is required")
    if vocab_size is not None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            raise InvalidArgument(
                f"input_ids: holds {low if low < 0 else high}; must be from 0 to"
                f" {vocab_size - 1}, the model's vocabulary"
            )
    if max_input_len is not None and size > max_input_len:
        raise PromptTooLong(
            f"Prompt length ({size}) exceeds maximum input length ({max_input_len})"
        )
    if size + max_tokens > max_seq_len:
        raise PromptTooLong(
            f"Prompt length ({size}) and request_output_len ({max_tokens})"
            f" exceed maximum sequence length ({max_seq_len})"
        )


def note_length_penalty(request: EngineRequest) -> None:
    """Log that a length penalty has no effect, on engines without beam search."""
    if request.sampling.length_penalty != 1:
        log_once(_log, "length_penalty has no effect without beam search, which this engine lacks")
