"""Inputs of a prediction as one typed value, and the sampling parameters that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cog_triton.errors import InvalidArgumentMaxTokens, InvalidArgumentMinTokens
from cog_triton.text.sampling import SAMPLING, SamplingParams

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionInputs:
    """The inputs of `Predictor.run`, which describes each.

    Cog takes 2.0 for an integer and passes it on as a float, hence the int() in `sampling`.
    """

    prompt: str
    system_prompt: str | None
    max_tokens: int
    min_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stop_sequences: str | None
    length_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    prompt_template: str | None
    log_performance_metrics: bool
    max_new_tokens: int | None
    min_new_tokens: int | None
    messages: list[dict[str, Any]] | None
    lora_name: str | None = None

    def sampling(self) -> SamplingParams:
        """Sampling parameters, with a random seed if none was given; raises E1005, E1101, E1102."""
        given = {
            item.name: item.read(getattr(self, item.name))
            for item in SAMPLING
            if item.inputs is not None
        }
        given["max_tokens"] = self._max_tokens()
        given["min_tokens"] = min(self._min_tokens(), self._max_tokens())
        return SamplingParams(**given)

    def notes(self) -> list[str]:
        """What was asked for and has no effect, or not the one that it says."""
        notes = []
        if self._min_tokens() > self._max_tokens():
            notes.append(f"min_tokens {self._min_tokens()} was clamped to max_tokens")
        if self.length_penalty != 1:
            notes.append("length_penalty has no effect: there is no beam search")
        return notes

    def _max_tokens(self) -> int:
        new, legacy = self.max_tokens, self.max_new_tokens
        if legacy is None or legacy == new:
            return int(new)
        if new != DEFAULT_MAX_TOKENS:
            raise InvalidArgumentMaxTokens(
                f"Can't set both max_tokens ({new}) and max_new_tokens ({legacy})"
            )
        return int(legacy)

    def _min_tokens(self) -> int:
        new, legacy = self.min_tokens, self.min_new_tokens
        if None not in (new, legacy) and new != legacy:
            raise InvalidArgumentMinTokens(
                f"Can't set both min_tokens ({new}) and min_new_tokens ({legacy})"
            )
        return max(int((legacy if new is None else new) or 0), 0)
