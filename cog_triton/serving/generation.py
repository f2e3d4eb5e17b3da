"""Generation: the request, the state while it runs, and the result, without any IO.

`Generation.feed` turns items of the engine into pieces of text; `generate` drives it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from cog_triton.engines.step_items import StepItem
from cog_triton.errors import CogTritonError, TritonMalformedEvent, TritonUnavailable
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.stream import TextStream
from cog_triton.text.tokenizer import EngineTokenizer


class TokenLogProb(NamedTuple):
    """A sampled token and the natural logarithm of its probability."""

    token_id: int
    log_prob: float


class TextPiece(NamedTuple):
    """New text, log probabilities of its tokens if requested, and the number of tokens so far."""

    text: str
    log_probs: Sequence[TokenLogProb]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Generation request, fitted into the engine's limits by `TextGenerator.plan`.

    `notes` go to the log of the prediction, e.g. that max_tokens was clamped. `engine_inputs` are
    inputs that only this engine has, as JSON values for Triton. `visible` are special tokens that
    are part of the text. `id` and `endpoint` are for logs.
    """

    input_ids: Sequence[int]
    sampling: SamplingParams
    stops: Sequence[str] = ()
    notes: Sequence[str] = ()
    id: str = ""
    endpoint: str = ""
    ignore_eos: bool = False
    return_log_probs: bool = False
    guide: str | None = None
    visible: Collection[str] = ()
    engine_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GenerationResult:
    """Result of a generation, so far or final; counts are tokens, times are seconds.

    `arrivals` are `time.perf_counter` values, each with the number of tokens that arrived then.
    `queue_time` is from arrival to admission, None until it is admitted.
    """

    output_token_count: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    queue_time: float | None = None
    time_to_first_token: float | None = None
    duration: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    cancelled: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole duration, as the original cog-triton reports it."""
        return self.output_token_count / self.duration if self.duration else 0.0


class Observer(Protocol):
    """Callbacks for every generation, called where it is driven."""

    def started(self, request: GenerationRequest) -> None:
        """A generation was requested; it is queued or runs from now on."""
        ...

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        """A generation ended; `error` is what its reader got, GeneratorExit if it disconnected."""
        ...

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """A request was rejected before generation, e.g. for invalid input."""
        ...


class TextDecoder:
    """State of a running generation: the engine's items in, pieces of text out."""

    def __init__(
        self, request: GenerationRequest, result: GenerationResult, tokenizer: EngineTokenizer
    ) -> None:
        self._request = request
        self._result = result
        self._text = TextStream(
            tokenizer,
            request.stops,
            min_tokens=request.sampling.min_tokens,
            visible=request.visible,
        )
        self.started = time.perf_counter()
        """When the request arrived, by time.perf_counter()."""
        self._received = 0
        self.ended = False
        """Whether all text was given; with a stop string, before the engine has ended."""

    def feed(self, items: Sequence[StepItem]) -> tuple[TextPiece | None, str | None]:
        """The piece that these items complete, None if there is none yet; and an engine's error.

        Raises E2105 if tokens before these were lost, E2104 if they lack log probabilities.
        """
        ids: list[int] = []
        log_probs: list[float] = []
        last = items[-1]
        for item in items:
            if item.ids or not item.error:
                if item.offset != self._received:
                    raise TritonUnavailable(
                        "tokens were lost on their way from the engine; try again"
                    )
                self._received += len(item.ids)
                ids += item.ids
                log_probs += item.log_probs[:: item.width] if item.width > 1 else item.log_probs
        pairs = self._pairs(ids, log_probs) if self._request.return_log_probs else ()
        text = self._decode(ids) if ids else ""
        error = None if self._text.stopped else last.error
        if self._text.stopped or (last.end and error is None):
            self.ended = True
            text += self._finish()
        count = self._result.output_token_count = self._text.token_count
        return (TextPiece(text, pairs, count) if text or pairs else None), error

    def _pairs(self, ids: list[int], log_probs: list[float]) -> list[TokenLogProb]:
        if len(log_probs) != len(ids):
            raise TritonMalformedEvent(f"{len(log_probs)} log probabilities for {len(ids)} tokens")
        return [TokenLogProb(*pair) for pair in zip(ids, log_probs, strict=True)]

    def _decode(self, ids: list[int]) -> str:
        result, now = self._result, time.perf_counter()
        result.arrivals.append((now, len(ids)))
        if result.time_to_first_token is None:
            result.time_to_first_token = now - self.started
        return self._text.feed(ids)

    def _finish(self) -> str:
        stream = self._text
        full = stream.token_count >= self._request.sampling.max_tokens and not stream.stopped
        self._result.finish_reason = "length" if full else "stop"
        return stream.finish(cut_characters=False)
