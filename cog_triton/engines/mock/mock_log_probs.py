"""Log probabilities of the mock: the same for the same tokens, and in order of likelihood."""

from __future__ import annotations

from collections.abc import Sequence

from cog_triton.engines.request import TokenEvent

_OF_PROMPT = -1.0


def top_log_probs(ids: Sequence[int], top: int, vocab_size: int) -> tuple[list[float], list[int]]:
    """Log probabilities of generated tokens, and the ids of the `top` likeliest beside each.

    Each token is the likeliest, with 0.0; those with the next ids follow.
    """
    values = [0.0, *(-float(place) for place in range(top))]
    others = [(token + place) % vocab_size for token in ids for place in range(top)]
    return values * len(ids), others


def prompt_event(ids: Sequence[int], top: int, vocab_size: int) -> TokenEvent:
    """The event of the prompt's tokens; each is as likely as the next ones are less."""
    values, others = top_log_probs(ids, top, vocab_size)
    shifted = [value + _OF_PROMPT for value in values]
    return TokenEvent(list(ids), shifted, alternatives=others, of_prompt=True)
