"""Output converters: vLLM's RequestOutput to events, as token ids or as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cog_triton.engines.request import EngineRequest, FinishReason, TokenEvent
from cog_triton.engines.stop_words import StopWords
from cog_triton.engines.vllm.host_messages import TextEvent, TextRequest
from cog_triton.errors import CogTritonError, VLLMUnknownError

_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "repetition": "stop",
    "abort": "cancelled",
}


class TokenOutputConverter:
    """Converts outputs to token events of one sequence; cuts end ids and stop words."""

    def __init__(self, request: EngineRequest) -> None:
        self._output = StopWords(request.stop_words, request.sampling.min_tokens)
        self._has_stop_words = bool(request.stop_words)
        self._has_log_probs = request.return_log_probs

    def convert(self, output: Any) -> TokenEvent | None:
        """The event for `output`, a RequestOutput; None if there is nothing to send yet."""
        if not output.outputs:
            return None
        completion = output.outputs[0]
        reason = completion.finish_reason
        if reason == "abort":
            return cancelled()
        tokens = list(completion.token_ids)
        log_probs = _log_probs(completion) if completion.logprobs else []
        if reason == "stop" and tokens:  # the end token, which vLLM leaves in
            del tokens[-1], log_probs[len(tokens) :]
        finish = None
        if reason is not None and (finish := _FINISH_REASONS.get(reason)) is None:
            return failed(_unknown_finish(reason))
        if not self._has_stop_words:
            return TokenEvent(tokens, log_probs, finish) if tokens or finish else None
        for place, token in enumerate(tokens):
            if self._output.add(token, log_probs[place] if log_probs else 0.0):
                return self._event(self._output.rest(), "stop")
        if finish is not None:
            return self._event(self._output.rest(), finish)
        ready = self._output.ready()
        return self._event(ready) if ready else None

    def _event(
        self, tokens: list[tuple[int, float]], finish: FinishReason | None = None
    ) -> TokenEvent:
        log_probs = [value for _, value in tokens] if self._has_log_probs else []
        return TokenEvent([token for token, _ in tokens], log_probs, finish)


class TextOutputConverter:
    """Converts outputs to text events: the new text of each of `n` sequences."""

    def __init__(self, request: TextRequest) -> None:
        self._request = request
        self._count = int(request.sampling.get("n", 1))

    def convert(self, output: Any) -> TextEvent | TokenEvent | None:
        """The event for `output`, a RequestOutput."""
        request, count = self._request, self._count
        event = TextEvent(
            texts=[""] * count,
            finish_reasons=[None] * count,
            cumulative_logprobs=[float("nan")] * count,
            logprobs=["null"] * count,
            output_token_counts=[0] * count,
            input_token_count=len(output.prompt_token_ids or ()),
            finish=_finish(output),
        )
        for completion in output.outputs:
            index, reason = completion.index, completion.finish_reason
            if reason is not None and reason not in _FINISH_REASONS:
                return failed(_unknown_finish(reason))
            event.texts[index] = completion.text
            event.finish_reasons[index] = reason
            event.output_token_counts[index] = len(completion.token_ids)
            if completion.cumulative_logprob is not None:
                event.cumulative_logprobs[index] = completion.cumulative_logprob
            if request.return_logprobs and "logprobs" in request.sampling:
                event.logprobs[index] = _logprobs_json(completion.logprobs)
        return event


def failed(error: CogTritonError) -> TokenEvent:
    """The last event of a request that failed, in either contract."""
    return TokenEvent([], [], error=error)


def cancelled() -> TokenEvent:
    """The last event of a request that was cancelled, in either contract."""
    return TokenEvent([], [], "cancelled")


def _finish(output: Any) -> str | None:
    if not output.finished:
        return None
    reasons = {completion.finish_reason for completion in output.outputs}
    return "cancelled" if "abort" in reasons else "stop"


def _unknown_finish(reason: str) -> CogTritonError:
    return VLLMUnknownError(f"vLLM ended the request with {reason!r}; its log says why")


def _log_probs(completion: Any) -> list[float]:
    """Log probability of each chosen token; vLLM lists likelier ones beside it."""
    tokens, found = completion.token_ids, completion.logprobs or ()
    return [float(place[token].logprob) for token, place in zip(tokens, found, strict=False)]


def _logprobs_json(logprobs: Any) -> str:
    if logprobs is None:
        return "null"
    return json.dumps(
        [
            {
                token: {
                    "logprob": item.logprob,
                    "rank": item.rank,
                    "decoded_token": item.decoded_token,
                }
                for token, item in place.items()
            }
            for place in logprobs
        ]
    )
