"""Output converters: vLLM's outputs to events, as token ids, text or embeddings."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

from cog_triton.engines.request import EngineRequest, FinishReason, TokenEvent
from cog_triton.engines.step_items import NO_TOKEN
from cog_triton.engines.stop_words import StopWords
from cog_triton.engines.vllm import engine_api
from cog_triton.engines.vllm.host_messages import TextEvent, TextRequest
from cog_triton.errors import CogTritonError, TritonUnavailable, VLLMUnknownError


class Converter(ABC):
    """Converts the outputs of one request to events."""

    def prompt_event(self, output: Any) -> TokenEvent | None:
        """The event of the prompt that comes before that of `output`; None without one."""
        return None

    @abstractmethod
    def convert(self, output: Any) -> TokenEvent | TextEvent | None:
        """The event for `output`; None if there is nothing to send yet."""


class EmbeddingConverter(Converter):
    """Converts the only output of an embedding request to its only event."""

    def convert(self, output: Any) -> TokenEvent:
        """The event for `output`; raises E2105 if vLLM aborted it, E2200 for NaN and infinity."""
        embedding = engine_api.embedding(output)
        if not embedding:
            raise aborted()
        if not all(map(isfinite, embedding)):
            raise VLLMUnknownError("vLLM's embedding has numbers that are not finite")
        return TokenEvent([], [], "stop", embedding=embedding)


_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "repetition": "stop",
}


class TokenOutputConverter(Converter):
    """Converts outputs to token events of one sequence; cuts end ids and stop words."""

    def __init__(self, request: EngineRequest) -> None:
        self._output = StopWords(request.stop_words, request.sampling.min_tokens)
        self._has_stop_words = bool(request.stop_words)
        self._has_log_probs = request.return_log_probs
        self._top = request.top_log_probs
        self._prompt = list(request.input_ids) if request.prompt_log_probs else None
        self._begun = False

    def prompt_event(self, output: Any) -> TokenEvent | None:
        """The event of the prompt: how many tokens were cached, by the first `output`.

        And the tokens, once `output` has their log probabilities.
        """
        begun, self._begun = self._begun, True
        cached = 0 if begun else max(output.num_cached_tokens or 0, 0)
        if self._prompt is None or not output.prompt_logprobs:
            return TokenEvent([], [], of_prompt=True, cached_tokens=cached) if cached else None
        ids, self._prompt = self._prompt, None
        if len(output.prompt_logprobs) != len(ids):
            raise VLLMUnknownError(
                f"vLLM gave log probabilities of {len(output.prompt_logprobs)} tokens for a prompt"
                f" of {len(ids)}"
            )
        event = _event_of_prompt(ids, output.prompt_logprobs, self._top)
        return replace(event, cached_tokens=cached)

    def convert(self, output: Any) -> TokenEvent | None:
        """The event for `output`, a RequestOutput; None if there is nothing to send yet."""
        if not output.outputs:
            return None
        completion = output.outputs[0]
        reason = completion.finish_reason
        if reason == "abort":
            return failed(aborted())
        tokens = list(completion.token_ids)
        if reason == "stop" and tokens:  # the end token, which vLLM leaves in
            del tokens[-1]
        log_probs, others = _log_probs(tokens, completion.logprobs, self._top)
        finish = None
        if reason is not None and (finish := _FINISH_REASONS.get(reason)) is None:
            return failed(_unknown_finish(reason))
        if not self._has_stop_words:
            if not (tokens or finish):
                return None
            return TokenEvent(tokens, log_probs, finish, alternatives=others)
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


class TextOutputConverter(Converter):
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
            finish="stop" if output.finished else None,
        )
        for completion in output.outputs:
            index, reason = completion.index, completion.finish_reason
            if reason == "abort":
                return failed(aborted())
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
    """The last event of a request that failed."""
    return TokenEvent([], [], error=error)


def aborted() -> CogTritonError:
    """What a client cancelled has ended here before; vLLM aborts the rest when an engine ends.

    So does an engine that lives, when another one of vLLM's data parallelism has died.
    """
    return TritonUnavailable("vLLM aborted the request: its engine ends")


def _unknown_finish(reason: str) -> CogTritonError:
    return VLLMUnknownError(f"vLLM ended the request with {reason!r}; its log says why")


def _log_probs(
    tokens: Sequence[int], found: Sequence[Mapping[int, Any]] | None, top: int
) -> tuple[list[float], list[int]]:
    """Log probabilities of each token and the `top` likeliest, and the ids of these.

    vLLM has the token itself among or beside the likeliest.
    """
    if not found:
        return [], []
    values: list[float] = []
    others: list[int] = []
    for token, place in zip(tokens, found, strict=False):
        values.append(float(place[token].logprob))
        if top:
            likeliest = sorted(place, key=lambda other: -place[other].logprob)[:top]
            missing = top - len(likeliest)
            values += [float(place[other].logprob) for other in likeliest] + [-inf] * missing
            others += likeliest + [NO_TOKEN] * missing
    return values, others


def _event_of_prompt(ids: list[int], found: Sequence[Any], top: int) -> TokenEvent:
    """The event of a prompt; vLLM has None for its first token."""
    values, others = _log_probs(ids[1:], found[1:], top)
    first = [-inf] * (1 + top)
    return TokenEvent(ids, first + values, alternatives=[NO_TOKEN] * top + others, of_prompt=True)


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
