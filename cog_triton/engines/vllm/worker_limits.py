"""Limits of vLLM's worker: what one request may ask of its sampler.

Model runner V2 keeps token ids of a request in arrays of a fixed size and raises beyond it, which
ends the engine; neither runner looks whether bad words are in the vocabulary. vLLM itself checks
only the number of bad words given as text, and that since 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cog_triton.errors import InvalidArgument

# End ids of a model, which vLLM adds to the stop_token_ids of a request.
_END_IDS = 16


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Worker limits: sizes in words or token ids; None where there is no limit."""

    vocab_size: int
    bad_words: int | None = None
    bad_word_tokens: int | None = None
    allowed_token_ids: int | None = None
    logit_bias: int | None = None
    stop_token_ids: int | None = None

    def check(self, params: Any, bad_words: Sequence[Sequence[int]] = ()) -> None:
        """Check SamplingParams and the token ids of its bad words; raises E1005."""
        _at_most(self.bad_words, len(bad_words), "bad_words: {} words")
        _at_most(self.bad_word_tokens, sum(map(len, bad_words)), "bad_words: {} tokens in all")
        for token in (token for word in bad_words for token in word):
            if not 0 <= token < self.vocab_size:
                raise InvalidArgument(
                    f"bad_words: holds token {token}; must be from 0 to {self.vocab_size - 1}, the"
                    " model's vocabulary"
                )
        _at_most(self.allowed_token_ids, _size(params.allowed_token_ids), "allowed_token_ids: {}")
        _at_most(self.logit_bias, _size(params.logit_bias), "logit_bias: {} tokens")
        if params.min_tokens and self.stop_token_ids is not None:
            most = self.stop_token_ids - _END_IDS
            _at_most(most, _size(params.stop_token_ids), "min_tokens with {} stop_token_ids")


def _size(values: Any) -> int:
    return len(values) if values else 0


def _at_most(limit: int | None, found: int, what: str) -> None:
    if limit is not None and found > limit:
        raise InvalidArgument(f"{what.format(found)}; must be at most {limit} on this engine")
