"""Sampler of the double, with VLLM_DOUBLE_SAMPLES: logits, what changes them, and draws.

The token that the prompt's repetition asks for is likely, others are by the token before. Penalties
count as vLLM's do, noise is keyed by seed and absolute position.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Any

_LIKELY = 3.0
_TOKENS = range(32, 127)


def sample(
    params: Any,
    prompt: list[int],
    output: list[int],
    wanted: int,
    eos: int,
    allowed: Collection[int] | None,
) -> int:
    """The next token after `prompt` and `output`; with a grammar, one that is `allowed`."""
    counts, position = Counter(output), len(prompt) + len(output)
    last, seen = [*prompt, *output][-1], {*prompt, *output}
    best = (-math.inf, eos)
    for token in {*_TOKENS, wanted} if allowed is None else allowed:
        if token == eos and (len(output) < params.min_tokens or params.ignore_eos):
            continue
        logit = _noise(7, last, token) + _LIKELY * (token == wanted)
        if token in seen and params.repetition_penalty != 1:
            logit /= params.repetition_penalty
        logit -= params.frequency_penalty * counts[token]
        logit -= params.presence_penalty * (token in counts)
        logit += (params.logit_bias or {}).get(token, 0.0)
        if params.temperature:
            noise = _noise(params.seed or 0, position, token)
            logit = logit / params.temperature - math.log(-math.log(noise))
        best = max(best, (logit, token))
    return best[1]


def _noise(seed: int, position: int, token: int) -> float:
    """A number between 0 and 1 that follows from three."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + token) & (2**64 - 1)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = ((mixed ^ mixed >> 31) * factor) & (2**64 - 1)
    return ((mixed >> 11) + 0.5) / 2**53
