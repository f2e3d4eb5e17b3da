"""Output converter: the LLM API's RequestOutput to token events."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cog_triton.engines.request import EngineRequest, FinishReason, TokenEvent
from cog_triton.engines.stop_words import StopWords, Tokens
from cog_triton.errors import CogTritonError, TritonUnknownError

_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
}


class OutputConverter:
    """Converts outputs of one request to token events; cuts end ids and stop words."""

    def __init__(self, request: EngineRequest, end_ids: Collection[int]) -> None:
        """`end_ids` are the model's own."""
        self._output = StopWords(request.stop_words, request.sampling.min_tokens)
        self._has_log_probs = request.return_log_probs
        self._end_ids = request.end_ids(frozenset(end_ids))
        self._seen = 0

    def convert(self, output: Any) -> TokenEvent | None:
        """The event for `output`, which has all tokens so far; None if nothing can be sent yet."""
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        reason = completion.finish_reason
        if reason is not None and reason not in _FINISH_REASONS:
            return failed(TritonUnknownError(f"TensorRT-LLM ended the request with {reason!r}"))
        if reason == "stop" and ids and ids[-1] in self._end_ids:
            ids.pop()
        for place in range(self._seen, len(ids)):
            log_prob = 0.0
            if self._has_log_probs:
                log_prob = _log_prob(completion.logprobs[place], ids[place])
            self._seen += 1
            if self._output.add(ids[place], log_prob):
                return self._event(self._output.rest(), "stop")
        if reason is not None:
            return self._event(self._output.rest(), _FINISH_REASONS[reason])
        ready = self._output.ready()
        return self._event(ready) if ready else None

    def _event(self, tokens: Tokens, finish: FinishReason | None = None) -> TokenEvent:
        log_probs = [value for _, value in tokens] if self._has_log_probs else []
        return TokenEvent([token for token, _ in tokens], log_probs, finish)


def failed(error: CogTritonError) -> TokenEvent:
    """The last event of a request that failed."""
    return TokenEvent([], [], error=error)


def _log_prob(value: Any, token: int) -> float:
    """Log probability of a token: the value itself, or one by token id beside the likeliest."""
    if isinstance(value, Mapping):
        value = value[token].logprob
    return float(value)
