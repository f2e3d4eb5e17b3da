"""Engine request and token events: input and output of every engine, in token ids."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

from typing_extensions import Self

from cog_triton import errors
from cog_triton.text.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Generation request: one prompt in token ids.

    `end_id` None means the engine's own end-of-sequence ids, -1 none at all.
    `stop_words` are token id sequences that end the output and are cut from it, `bad_words`
    such that are never generated. `guide` is the JSON Schema that the output follows, as text.
    """

    input_ids: Sequence[int]
    sampling: SamplingParams
    end_id: int | None = None
    pad_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: str | None = None
    streaming: bool = True
    exclude_input_in_output: bool = False
    return_log_probs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False

    def end_ids(self, defaults: Set[int]) -> Set[int]:
        """The ids that end the output; `defaults` are the engine's own."""
        if self.end_id is None:
            return defaults
        return frozenset([self.end_id] if self.end_id >= 0 else [])


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request; `finish` or `error` is set on its last event only."""

    token_ids: list[int]
    log_probs: list[float]
    finish: FinishReason | None = None
    error: errors.CogTritonError | None = None

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
        )
