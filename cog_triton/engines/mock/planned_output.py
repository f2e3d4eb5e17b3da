"""Output plan of one mock request: its length and end, computed before the first token."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from cog_triton.engines.mock.mock_request import Injection, MockRequest
from cog_triton.engines.request import FinishReason
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """Output plan: `steps` tokens are generated, the first `tokens` of them sent.

    They are those of the passage from the place `start` on.
    """

    steps: int
    tokens: int
    end: FinishReason | Injection
    start: int = 0


def plan_output(request: MockRequest, passage: Sequence[int], end_ids: Set[int]) -> PlannedOutput:
    """Plan the output of `request`; raises E1005 for an injection after the output's end."""
    output = _stopped(request, passage, end_ids)
    max_tokens = request.sampling.max_tokens
    output = output or PlannedOutput(max_tokens, max_tokens, "length")
    after = request.inject_after - request.resumed_tokens
    if request.inject is None or after < 0:
        return output
    if after >= output.steps:
        raise InvalidArgument(
            f"inject_after={after}: must be less than {output.steps}, the tokens that are made"
        )
    return PlannedOutput(after + 1, min(after, output.tokens), request.inject)


def _stopped(
    request: MockRequest, passage: Sequence[int], end_ids: Set[int]
) -> PlannedOutput | None:
    """The output up to the first end id or stop word, None if there is none."""
    if end_ids.isdisjoint(passage) and not request.stop_words:
        return None
    sampling = request.sampling
    words = StopWords(request.stop_words, sampling.min_tokens)
    # One pass over the passage finds whatever there is to find.
    longest = max(map(len, request.stop_words), default=0)
    for place in range(min(sampling.max_tokens, sampling.min_tokens + len(passage) + longest)):
        token = passage[place % len(passage)]
        if token in end_ids and place >= sampling.min_tokens:
            return PlannedOutput(place + 1, place, "stop")
        if words.add(token, 0.0):
            return PlannedOutput(place + 1, len(words.rest()), "stop")
    return None
