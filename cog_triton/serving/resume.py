"""Resumption: the request that goes on with a generation whose engine died, or why none can.

The promises are in docs/supervision.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cog_triton.engines.base import EngineLimits, ResumeRules
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.serving.generation import GenerationResult, TextDecoder
from cog_triton.text.sampling import MAX_TOKEN_IDS, DrawnSeed, SamplingParams

_MAX_TRIES = 5
_MAX_INTERRUPTIONS = 20
_MOST_BIAS = 100.0
"""vLLM clamps a token's bias to it, either way (SamplingParams.from_optional of 0.33)."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Reason why a generation cannot go on; `parameter` is its short name, for metrics."""

    parameter: str
    text: str


class Resumption:
    """Resumption of one generation: its engine's losses, and the requests that go on after them."""

    def __init__(
        self,
        request: EngineRequest,
        decoder: TextDecoder,
        result: GenerationResult,
        rules: ResumeRules,
        limits: EngineLimits,
        imports: Callable[[], bool] = lambda: False,
    ) -> None:
        """`decoder` has the tokens made; `result` is told of interruptions.

        `imports` says whether the engine has taken tokens as output, where it was ``asked``.
        """
        self._request = request
        self._decoder = decoder
        self._result = result
        self._rules = rules
        self._limits = limits
        self._imports = imports
        self._since: float | None = None
        self._tries = 0

    @property
    def waits(self) -> bool:
        """Whether the engine was lost, and has made no new token since."""
        return self._since is not None

    def require(self, error: CogTritonError) -> None:
        """Raise E2105 saying why it cannot go on after the engine's `error`, if it cannot."""
        found: EngineRequest | Obstacle
        if self._tries >= _MAX_TRIES:
            found = Obstacle("tries", f"{_MAX_TRIES} tries in a row brought no token")
        elif self._result.interruptions >= _MAX_INTERRUPTIONS:
            found = Obstacle("interruptions", f"it was interrupted {_MAX_INTERRUPTIONS} times")
        else:
            found = self._continuation()
        if isinstance(found, Obstacle):
            self._result.obstacle = found.parameter
            raise TritonUnavailable(
                f"{error.detail}; it does not go on after {len(self._decoder.made)} tokens:"
                f" {found.text}"
            )

    def begin(self) -> None:
        """The engine was lost to it."""
        if self._since is None:
            self._since = time.perf_counter()
        self._result.interruptions += 1

    def next_request(self) -> EngineRequest:
        """What the engine is to be sent now, whose items the decoder expects."""
        if self._since is None:
            return self._request
        found = self._continuation()
        assert isinstance(found, EngineRequest)  # as it was when it was interrupted
        prompted = len(found.input_ids) - len(self._request.input_ids)
        self._decoder.resume(prompted + len(found.made), prompted)
        self._tries += 1
        return found

    def proven(self) -> None:
        """The engine has made a token since the last submission, maybe a known one once more."""
        self._tries = 0

    def went_on(self) -> None:
        """The engine has made a new one."""
        if self._since is not None:
            waited = time.perf_counter() - self._since
            self._result.resumptions.append((self._decoder.known, waited))
            self._since = None

    def _continuation(self) -> EngineRequest | Obstacle:
        decoder, rules = self._decoder, self._rules
        return continuation(
            self._request,
            decoder.made,
            rules,
            self._limits,
            prompt_told=decoder.prompt_told,
            imports=rules.imports == "asked" and self._imports(),
            parted=decoder.parted,
        )


def continuation(
    request: EngineRequest,
    made: Sequence[int],
    rules: ResumeRules,
    limits: EngineLimits,
    *,
    prompt_told: bool = False,
    imports: bool = False,
    parted: bool = False,
) -> EngineRequest | Obstacle:
    """The request for what is left of `request` after the tokens `made`, or with these once more.

    `prompt_told` says that the prompt's log probabilities are complete, so that they are not asked
    for again. `imports` says that an engine which was ``asked`` takes tokens as output, `parted`
    that one which `replays` made others. Without tokens made the request begins anew.
    """
    request = replace(request, prompt_log_probs=request.prompt_log_probs and not prompt_told)
    if not made:
        return request
    if rules.replays and _needs_replay(request):
        if not parted:
            return request
        if name := _state(request):
            return Obstacle(name, f"made again, the tokens are others: {name} cannot go on")
    if imports or rules.imports == "always":
        return replace(request, made=tuple(made))
    if request.guide is not None:
        return Obstacle("guide", "a guide cannot go on amid its output on this engine")
    size = len(request.input_ids) + len(made)
    if rules.max_input_len and size > limits.max_input_len:
        return Obstacle(
            "max_input_len",
            f"prompt and output are {size} tokens, the engine's max_input_len is"
            f" {limits.max_input_len}",
        )
    sampling = _carried_penalties(request.sampling, made, rules)
    if isinstance(sampling, Obstacle):
        return sampling
    return replace(request, made=tuple(made), sampling=sampling).as_prompt()


def _state(request: EngineRequest) -> str:
    """What of a request counts its output alone, "" if nothing does."""
    if request.guide is not None:
        return "guide"
    names = ("presence_penalty", "frequency_penalty")
    return next((name for name in names if getattr(request.sampling, name)), "")


def _needs_replay(request: EngineRequest) -> bool:
    sampling = request.sampling
    drawn = not (sampling.greedy or isinstance(sampling.seed, DrawnSeed))
    return drawn or bool(_state(request))


def _carried_penalties(
    sampling: SamplingParams, made: Sequence[int], rules: ResumeRules
) -> SamplingParams | Obstacle:
    if sampling.presence_penalty and rules.presence_penalty is None:
        return Obstacle("presence_penalty", "presence_penalty counts output alone on this engine")
    penalty = sampling.frequency_penalty
    if not penalty or rules.frequency_penalty == "sequence":
        return sampling
    if rules.frequency_penalty is None:
        return Obstacle("frequency_penalty", "frequency_penalty counts output alone on this engine")
    if sampling.repetition_penalty != 1:
        return Obstacle(
            "frequency_penalty", "frequency_penalty beside repetition_penalty is no logit_bias"
        )
    bias = dict(sampling.logit_bias)
    for token, count in Counter(made).items():
        bias[token] = bias.get(token, 0.0) - penalty * count
    if len(bias) > MAX_TOKEN_IDS or max(map(abs, bias.values())) > _MOST_BIAS:
        return Obstacle("frequency_penalty", "frequency_penalty is more than a logit_bias can hold")
    return replace(sampling, logit_bias=bias)
