"""How the output of one request goes: known from the start, since the mock always says the same."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from cog_triton.engines.mock.mock_request import Injection, MockRequest
from cog_triton.engines.request import FinishReason
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Output:
    """Of `steps` tokens that are made the first `tokens` leave; it ends with the last step."""

    steps: int
    tokens: int
    end: FinishReason | Injection


def plan(request: MockRequest, passage: Sequence[int], end_ids: Set[int]) -> Output:
    """The output of `request`; raises E1005 for something injected that would never happen."""
    output = _stopped(request, passage, end_ids)
    max_tokens = request.sampling.max_tokens
    output = output or Output(max_tokens, max_tokens, "length")
    if request.inject is None:
        return output
    if request.inject_after >= output.steps:
        raise InvalidArgument(
            f"inject_after={request.inject_after}: must be less than {output.steps}, the tokens"
            " that are made"
        )
    tokens = min(request.inject_after, output.tokens)
    return Output(request.inject_after + 1, tokens, request.inject)


def _stopped(request: MockRequest, passage: Sequence[int], end_ids: Set[int]) -> Output | None:
    """The output up to an end id or a stop word, None if there is none of them."""
    if end_ids.isdisjoint(passage) and not request.stop_words:
        return None
    sampling = request.sampling
    words = StopWords(request.stop_words, sampling.min_tokens)
    # Beyond this the passage has been gone through once, and nothing new comes.
    longest = max(map(len, request.stop_words), default=0)
    for place in range(min(sampling.max_tokens, sampling.min_tokens + len(passage) + longest)):
        token = passage[place % len(passage)]
        if token in end_ids and place >= sampling.min_tokens:
            return Output(place + 1, place, "stop")
        if words.add(token, 0.0):
            return Output(place + 1, len(words.rest()), "stop")
    return None
