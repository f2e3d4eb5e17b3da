"""Resumption: the request that goes on with a generation whose engine died, or why none can.

`parameters` says what is carried over, and how; docs/supervision.md has it as a table.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cog_triton.engines.base import EngineLimits, ResumeRules
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.serving.generation import GenerationResult, TextDecoder
from cog_triton.text.sampling import MAX_TOKEN_IDS, SAMPLING, SamplingParams

_MAX_TRIES = 5
_MAX_INTERRUPTIONS = 20
_SEED_STEP = 0x9E3779B97F4A7C15  # the golden ratio's, as SplitMix64 has it: offsets differ widely
_MOST_BIAS = 100.0
"""vLLM clamps a token's bias to it, either way (SamplingParams.from_optional of 0.26 and 0.33)."""


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
    ) -> None:
        """`decoder` has the tokens made; `result` is told of interruptions."""
        self._request = request
        self._decoder = decoder
        self._result = result
        self._rules = rules
        self._limits = limits
        self._since: float | None = None
        self._tries = 0

    @property
    def waits(self) -> bool:
        """Whether the engine was lost, and has made no token since."""
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
        self._decoder.resume()
        self._tries += 1
        return found

    def proven(self) -> None:
        """The engine has made a token since the last submission."""
        self._tries = 0
        if self._since is not None:
            waited = time.perf_counter() - self._since
            self._result.resumptions.append((self._decoder.base, waited))
            self._since = None

    def _continuation(self) -> EngineRequest | Obstacle:
        decoder = self._decoder
        return continuation(
            self._request,
            decoder.made,
            self._rules,
            self._limits,
            prompt_told=decoder.prompt_told,
        )


def continuation(
    request: EngineRequest,
    made: Sequence[int],
    rules: ResumeRules,
    limits: EngineLimits,
    *,
    prompt_told: bool = False,
) -> EngineRequest | Obstacle:
    """The request for what is left of `request` after the tokens `made`.

    `prompt_told` says that the prompt's log probabilities are complete, so that they are not asked
    for again. Without tokens made the request begins anew.
    """
    request = replace(request, prompt_log_probs=request.prompt_log_probs and not prompt_told)
    if not made:
        return request
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
    count = len(made)
    return replace(
        request,
        input_ids=[*request.input_ids, *made],
        resumed_tokens=count,
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - count,
            min_tokens=max(0, sampling.min_tokens - count),
            seed=resumed_seed(sampling.seed, count),
        ),
    )


def resumed_seed(seed: int, made: int) -> int:
    """Random seed after `made` tokens: the same one would repeat its first draws."""
    return (seed + made * _SEED_STEP) % 2**63


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


_ENDS = "E2105"
_CARRIED = ("max_tokens", "min_tokens", "seed")
_SENT_AGAIN = ", ".join(
    f"`{item.name}`"
    for item in SAMPLING
    if item.body is not None and item.name not in _CARRIED and not item.name.endswith("_penalty")
)
"""Parameters that a continuation has as the request had them."""


def parameters(rules: ResumeRules) -> Mapping[str, str]:
    """By parameter: how a family of these rules goes on with it, once tokens were made."""
    counted = "counts prompt and output"
    frequency = {
        "sequence": counted,
        "logit_bias": "as `logit_bias`; E2105 beside `repetition_penalty`, beyond 1024 tokens,"
        " and where a bias exceeds 100",
        None: _ENDS,
    }
    return {
        "`max_tokens`, `min_tokens`": "less what was made",
        "stop strings, stop token ids, detokenizer": "lives in the front end",
        "usage, finish reason": "as of one request",
        _SENT_AGAIN: "sent again",
        "`seed`": "derived from seed and tokens made",
        "`repetition_penalty`": counted,
        "`frequency_penalty`": frequency[rules.frequency_penalty],
        "`presence_penalty`": _ENDS if rules.presence_penalty is None else counted,
        "log probabilities": "of the new tokens; the prompt's not again",
        "guided decoding, forced tool calls": "E2105 once there is a token",
        "`n`, `best_of`": "each sequence by itself",
        "LoRA adapter, images": "sent again",
        "prompt and output beyond `max_input_len`": _ENDS if rules.max_input_len else "goes on",
    }


def table(families: Mapping[str, ResumeRules]) -> str:
    """The table of docs/supervision.md; what all families do alike stands once."""
    lines = [f"| | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
    columns = [parameters(rules) for rules in families.values()]
    for parameter in columns[0]:
        told = [column[parameter] for column in columns]
        cells = told if len(set(told)) > 1 else [told[0], *["same"] * (len(told) - 1)]
        lines.append(f"| {parameter} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
