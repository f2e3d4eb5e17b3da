"""Generation: the request, the state while it runs, and the result, without any IO.

`Generation.feed` turns items of the engine into pieces of text; `generate` drives it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import CACHED, EMBEDDING, LENGTH, NO_TOKEN, PROMPT, StepItem
from cog_triton.errors import CogTritonError, TritonMalformedEvent, TritonUnavailable
from cog_triton.serving.tenants import CURRENT, LOWEST, Tenant
from cog_triton.text.reasoning import ReasoningCount
from cog_triton.text.stop_strings import TextStream
from cog_triton.text.tokenizer import EngineTokenizer


class TokenLogProb(NamedTuple):
    """A token and the natural logarithm of its probability.

    `top` are ids of the likeliest tokens in its place with theirs, if requested.
    """

    token_id: int
    log_prob: float
    top: Sequence[tuple[int, float]] = ()


class TextPiece(NamedTuple):
    """New text, log probabilities of its tokens if requested, and the number of tokens so far.

    `prompt` are those of the prompt's tokens from the second on, if requested: once.
    """

    text: str
    log_probs: Sequence[TokenLogProb]
    tokens: int
    prompt: Sequence[TokenLogProb] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What is asked of `engine`, and how its tokens become text; see `TextGenerator.plan`.

    `notes` go to the log of the prediction, e.g. that max_tokens was clamped. `engine_inputs` are
    inputs that only this engine has, as JSON values for Triton. `visible` are special tokens that
    are part of the text. `reasoning` has the arguments of `ReasoningCount`. `id` and `endpoint` are
    for logs. The `tenant` is that of the context in which it is made.
    """

    engine: EngineRequest
    stops: Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    visible: Collection[str] = ()
    reasoning: tuple[str, str, bool] | None = None
    notes: Sequence[str] = ()
    id: str = ""
    endpoint: str = ""
    tenant: Tenant | None = field(default_factory=CURRENT.get)
    asked_priority: int | None = None
    engine_inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def priority(self) -> int:
        """Its priority within the bounds of its tenant's key; without tenants as it was asked."""
        if self.tenant is None:
            return max(-LOWEST, min(LOWEST, self.asked_priority or 0))
        return self.tenant.bounded_priority(self.asked_priority)


@dataclass(slots=True)
class GenerationResult:
    """Result of a generation, so far or final; counts are tokens, times are seconds.

    `arrivals` are `time.perf_counter` values, each with the number of tokens that arrived then.
    `queue_time` is from arrival to admission, None until it is admitted. `prompt_length`
    is None unless the engine tells it, since only that knows the tokens of images.
    `cached_tokens` of the prompt were in the engine's KV cache, as far as the engine reports it.
    `reasoning_tokens` are those up to the end of the reasoning, its marker included.
    `stop_string` is the one that ended the text. `interruptions` counts how often the engine was
    lost; each of `resumptions` is the number of tokens before it, and the time until the next one.
    `obstacle` is why it could not go on.
    """

    output_token_count: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    stop_string: str | None = None
    queue_time: float | None = None
    time_to_first_token: float | None = None
    duration: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    cancelled: bool = False
    prompt_length: int | None = None
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    embedding: Sequence[float] = ()
    interruptions: int = 0
    resumptions: list[tuple[int, float]] = field(default_factory=list)
    obstacle: str | None = None

    def prompt_tokens(self, request: GenerationRequest) -> int:
        """Tokens of the prompt of this result's `request`, those of its images included."""
        return self.prompt_length or len(request.engine.input_ids)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole duration, as the original cog-triton reports it."""
        return self.output_token_count / self.duration if self.duration else 0.0


class Observer(Protocol):
    """Callbacks for every generation, called where it is driven."""

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        """A generation ended; `error` is what its reader got, GeneratorExit if it disconnected."""

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """A request was rejected before generation, e.g. for invalid input."""


class TextDecoder:
    """State of a running generation: the engine's items in, pieces of text out."""

    def __init__(
        self, request: GenerationRequest, result: GenerationResult, tokenizer: EngineTokenizer
    ) -> None:
        self._request = request.engine
        self._tells_log_probs = request.engine.return_log_probs or bool(request.engine.echoed)
        self._result = result
        self._text = TextStream(
            tokenizer,
            request.stops,
            min_tokens=request.engine.sampling.min_tokens,
            visible=request.visible,
            stop_ids=frozenset(request.stop_token_ids),
        )
        marks = request.reasoning
        self._reasoning = None if marks is None else ReasoningCount(*marks)
        self.started = time.perf_counter()
        """When the request arrived, by time.perf_counter()."""
        self.made: list[int] = []
        """Tokens of the engine so far, all submissions together."""
        self.known = 0
        """Those of them that were made before the present submission."""
        self.parted = False
        """Whether an engine that was to make them again has made others."""
        self._base = self._prompted = self._received = 0
        self._prompt_received = 0
        self._prompt: list[TokenLogProb] = []
        self.prompt_told = False
        """Whether the prompt's log probabilities were given."""
        self.ended = False
        """Whether all text was given; with a stop string, before the engine has ended."""

    def feed(self, items: Sequence[StepItem]) -> tuple[TextPiece | None, str | None]:
        """The piece that these items complete, None if there is none yet; and an engine's error.

        Raises E2105 if tokens before these were lost, E2104 if they lack log probabilities.
        """
        last = items[-1]
        ids: list[int] = last.ids
        pairs: list[TokenLogProb] | None = None
        prompt: Sequence[TokenLogProb] = ()
        if len(items) == 1 and self._is_plain(last):
            self._received += len(ids)
        else:
            ids, pairs, prompt = self._taken(items)
        self.made += ids
        text = self._decode(ids) if ids else ""
        stopped = self._text.stopped
        if stopped and pairs is not None:
            del pairs[self._text.token_count - self._result.output_token_count :]
        error = None if stopped else last.error
        if stopped or (last.end and error is None):
            self.ended = True
            text += self._finish(last.end)
        count = self._result.output_token_count = self._text.token_count
        if not (text or pairs or prompt):
            return None, error
        self.prompt_told = self.prompt_told or bool(prompt)
        return TextPiece(text, () if pairs is None else pairs, count, prompt), error

    def _is_plain(self, item: StepItem) -> bool:
        """Whether an item only brings new tokens, as nearly all do."""
        return (
            item.offset == self._received
            and not item.sequence
            and not self._tells_log_probs
            and self._base + item.offset == len(self.made)
        )

    def _taken(
        self, items: Sequence[StepItem]
    ) -> tuple[list[int], list[TokenLogProb] | None, Sequence[TokenLogProb]]:
        """New tokens of items, and their log probabilities and the prompt's, if requested."""
        ids: list[int] = []
        pairs: list[TokenLogProb] | None = [] if self._request.return_log_probs else None
        prompt: Sequence[TokenLogProb] = ()
        for item in items:
            if item.sequence == EMBEDDING:
                self._result.embedding = item.log_probs
                continue
            if item.sequence == CACHED:  # of the first submission, which has the prompt alone
                self._result.cached_tokens = self._result.cached_tokens or item.offset
                continue
            if item.sequence == PROMPT and not item.ids and item.offset:
                self._result.prompt_length = item.offset - self._prompted
                continue
            if item.sequence == PROMPT:
                prompt = self._prompt_pairs(item) or prompt
                continue
            if item.ids or not item.error:
                if item.offset != self._received or (item.ids and self._lacks_prompt):
                    raise _lost()
                again = self._made_again(item)
                self._received += len(item.ids)
                ids += item.ids[again:]
                if pairs is not None:
                    pairs += self._pairs(item)[again:]
        return ids, pairs, prompt

    def resume(self, base: int, prompted: int) -> None:
        """Expect items of a new submission, which goes on after the first `base` tokens of `made`.

        Those that follow these are made again. `prompted` of them are in its prompt.
        """
        self.known = len(self.made)
        self._base, self._prompted, self._received = base, prompted, 0
        if not self.prompt_told:  # it comes anew
            self._prompt_received = 0
            self._prompt.clear()

    @property
    def resumed(self) -> bool:
        """Whether the present submission has brought a token."""
        return self._received > 0

    @property
    def goes_on(self) -> bool:
        """Whether it has brought a new one."""
        return len(self.made) > self.known

    @property
    def last_item(self) -> StepItem | None:
        """The end that the engine did not come to tell: all of max_tokens are made."""
        count = len(self.made)
        full = count >= self._request.sampling.max_tokens
        return StepItem(0, 0, self._received, [], [], LENGTH) if full else None

    def _made_again(self, item: StepItem) -> int:
        """How many of an item's tokens are known; raises E2105 if they differ, or end before."""
        at = self._base + self._received
        known = self.made[at : at + len(item.ids)]
        ended = item.end and not item.error and at + len(item.ids) < len(self.made)
        if known != list(item.ids[: len(known)]) or ended:
            self.parted = True
            raise TritonUnavailable("made again, the tokens are others")
        return len(known)

    @property
    def _lacks_prompt(self) -> bool:
        return self._prompt_received < len(self._request.echoed)

    def _prompt_pairs(self, item: StepItem) -> Sequence[TokenLogProb]:
        """Log probabilities of the prompt, once all of them have come."""
        if item.offset != self._prompt_received:
            raise _lost()
        self._prompt_received += len(item.ids)
        self._prompt += self._pairs(item)
        return () if self._lacks_prompt else self._prompt[1:]

    def _pairs(self, item: StepItem) -> Sequence[TokenLogProb]:
        ids, log_probs, width = item.ids, item.log_probs, item.width
        if len(log_probs) != len(ids) * width or (ids and not width):
            raise TritonMalformedEvent(f"{len(log_probs)} log probabilities for {len(ids)} tokens")
        top = self._request.top_log_probs
        if width <= 1 or not top:
            return [TokenLogProb(*pair) for pair in zip(ids, log_probs[:: width or 1], strict=True)]
        others = width - 1
        return [
            TokenLogProb(
                token,
                log_probs[place * width],
                [
                    pair
                    for pair in zip(
                        item.alternatives[place * others : (place + 1) * others],
                        log_probs[place * width + 1 : (place + 1) * width],
                        strict=True,
                    )
                    if pair[0] != NO_TOKEN
                ][:top],
            )
            for place, token in enumerate(ids)
        ]

    def _decode(self, ids: list[int]) -> str:
        result, now = self._result, time.perf_counter()
        result.arrivals.append((now, len(ids)))
        if result.time_to_first_token is None:
            result.time_to_first_token = now - self.started
        if self._reasoning is None:
            return self._text.feed(ids)
        text = ""
        for place, token in enumerate(ids):  # one by one: the reasoning may end between them
            if self._reasoning.ended:
                self._reasoning = None
                return text + self._text.feed(ids[place:])
            text += (new := self._text.feed([token]))
            self._reasoning.add(new)
            result.reasoning_tokens = min(self._reasoning.tokens, self._text.token_count)
            if self._text.stopped:
                break
        return text

    def _finish(self, end: int) -> str:
        stream, request = self._text, self._request
        full = stream.token_count >= request.sampling.max_tokens
        # Images may leave less room than was planned.
        full = (full or (bool(request.images) and end == LENGTH)) and not stream.stopped
        self._result.finish_reason = "length" if full else "stop"
        text = stream.finish(cut_characters=False)
        self._result.stop_string = stream.matched
        return text


def _lost() -> TritonUnavailable:
    return TritonUnavailable("tokens were lost on their way from the engine; try again")
