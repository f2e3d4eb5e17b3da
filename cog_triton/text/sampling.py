"""Sampling parameters: one validated set, shared by every engine family."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from cog_triton.errors import InvalidArgument

MAX_SEED = 2**64 - 1
MAX_TOKENS = 2**31 - 1
"""Tokens are counted in 32 bits, which bounds `max_tokens`, `min_tokens` and `top_k`."""
MAX_LOGIT_BIAS = 1024
"""Token ids that a request may have a bias for, as vLLM's workers have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; construction raises E1005 naming one out of range.

    `max_tokens` and `min_tokens` count generated tokens. `temperature` 0, `top_k` 1, or
    `top_k` 0 with `top_p` 0 mean greedy decoding; `top_k` 0 alone turns top-k off. The
    penalties act on generated tokens, 1.0 (repetition, length) and 0.0 (presence,
    frequency) being neutral. `min_p` leaves out tokens less likely than that part of the likeliest
    one. `logit_bias` is added to the logits of token ids.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidArgument(f"{item.name}={value}: must be a finite number")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "must be at least 1")
        for name in ("max_tokens", "min_tokens", "top_k"):
            value = getattr(self, name)
            _require(value <= MAX_TOKENS, name, value, "must be less than 2^31")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "must not be negative")
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}"
            )
        _require(self.temperature >= 0, "temperature", self.temperature, "must not be negative")
        _require(self.top_k >= 0, "top_k", self.top_k, "must not be negative")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be from 0 to 1")
        _require(0 <= self.top_p <= 1, "top_p", self.top_p, "must be from 0 to 1")
        _require(
            self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "must be greater than 0",
        )
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "must be from 0 to 2^64 - 1")

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy, so the random seed has no effect."""
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)


def resolve_seed(seed: float | None) -> int:
    """A request's seed, without its sign (modulo 2^64); None and -1 ask for a random one."""
    if seed is None or seed == -1:
        return secrets.randbelow(2**31)
    return int(seed) + (2**64 if -(2**63) <= seed < 0 else 0)


def _require(holds: bool, name: str, value: float, rule: str) -> None:
    if not holds:
        raise InvalidArgument(f"{name}={value}: {rule}")
