"""Output of a request to the mock: the tokens that are made, those that are sent, and the end."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from cog_triton.engines.mock.mock_directory import MockModel
from cog_triton.engines.mock.mock_request import Injection, MockRequest
from cog_triton.engines.request import FinishReason, check_prompt
from cog_triton.engines.stop_words import StopWords
from cog_triton.errors import InvalidArgument

_UNSUPPORTED = {"bad_words": "bad_words_list", "guide": "guided_decoding_guide"}


@dataclass(frozen=True, slots=True)
class Output:
    """Planned output: `steps` tokens of `passage`, over and over, of which `tokens` are sent."""

    passage: list[int]
    steps: int
    tokens: int
    end: FinishReason | Injection

    def ids(self, start: int, stop: int) -> list[int]:
        """The tokens from one place of the output to another."""
        size = len(self.passage)
        return [self.passage[place % size] for place in range(start, stop)]


def plan_output(model: MockModel, request: MockRequest, skipped: int = 0) -> Output:
    """Plan what `request` is answered after its `made` tokens and `skipped` ones of the passage.

    One that may fill the model's context, as without a limit of its own, ends with the passage.
    Raises E1002 or E1005 for a request that cannot be served.
    """
    check_prompt(request, max_seq_len=model.max_seq_len, vocab_size=model.vocab_size)
    for attribute, name in _UNSUPPORTED.items():
        if getattr(request, attribute) and not (attribute == "guide" and model.answers):
            raise InvalidArgument(f"{name}: this engine does not support {name}")
    passage = model.output_for(request.input_ids)
    if allowed := request.sampling.allowed_token_ids:
        passage = [token for token in passage if token in allowed] or list(allowed)
    made = len(request.made)
    if start := (made + skipped) % len(passage):
        passage = passage[start:] + passage[:start]
    rest = request.as_prompt()
    end_ids, limits = request.end_ids(frozenset(model.eos_ids)), rest.sampling
    output = _stopped(rest, passage, end_ids)
    last = max(len(passage) - made, limits.min_tokens, 1)
    fills = len(rest.input_ids) + limits.max_tokens >= model.max_seq_len
    if end_ids and last < output.steps and fills:
        output = Output(passage, last, last, "stop")
    after = request.inject_after - made
    if request.inject is None or after < 0:
        return output
    if after >= output.steps:
        raise InvalidArgument(
            f"inject_after={after}: must be less than {output.steps}, the tokens that are made"
        )
    tokens = min(after, output.tokens)
    return replace(output, steps=after + 1, tokens=tokens, end=request.inject)


def _stopped(request: MockRequest, passage: list[int], end_ids: Set[int]) -> Output:
    """The output up to the first end id or stop word, or else up to `max_tokens`."""
    least, most = request.sampling.min_tokens, request.sampling.max_tokens
    if request.stop_words or not end_ids.isdisjoint(passage):
        words = StopWords(request.stop_words, least)
        # One pass over the passage finds whatever there is to find.
        longest = max(map(len, request.stop_words), default=0)
        for place in range(min(most, least + len(passage) + longest)):
            token = passage[place % len(passage)]
            if token in end_ids and place >= least:
                return Output(passage, place + 1, place, "stop")
            if words.add(token, 0.0):
                return Output(passage, place + 1, len(words.rest()), "stop")
    return Output(passage, most, most, "length")
