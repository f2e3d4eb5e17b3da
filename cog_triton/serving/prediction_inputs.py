"""Inputs of a prediction as one typed value, and the sampling parameters that they ask for.

Cog reads the fields of a dataclass as the inputs. They are named as in the original cog-triton, and
bounded by the rows of `SamplingParams` that have their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from cog_triton.errors import InvalidArgumentMaxTokens, InvalidArgumentMinTokens
from cog_triton.text.sampling import SAMPLING, SamplingParams

DEFAULT_MAX_TOKENS = 512
INPUTS = {item.name: item for item in SAMPLING if item.inputs is not None}
"""Rows of the sampling parameters that are inputs."""


def given(default: Any, description: str, **rules: Any) -> Any:
    """A dataclass's field that is an input; `rules` are further arguments of Cog's `Input`."""
    return field(default=default, metadata={"description": description, **rules})


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionInputs:
    """The inputs of the runner; Cog passes those alone that a request has.

    Cog takes 2.0 for an integer and passes it on as a float, hence the int() in `sampling`.
    """

    prompt: str = given("", "Prompt to send to the model; or send messages instead.")
    system_prompt: str | None = given(
        None,
        "System prompt that guides the behaviour of the model. Defaults to the"
        " server's SYSTEM_PROMPT. Used through {system_prompt} of the prompt template, or"
        " through the model's own chat template.",
    )
    max_tokens: int = given(
        DEFAULT_MAX_TOKENS,
        "Maximum number of tokens to generate. A word is generally 2-3 tokens.",
    )
    min_tokens: int | None = given(None, "Minimum number of tokens to generate; -1 for none.")
    temperature: float = given(
        0.7, "Randomness of the output: 0 is deterministic, above 1 is very random."
    )
    top_p: float = given(
        0.95, "Samples from the most likely tokens whose probabilities add up to top_p."
    )
    top_k: int = given(0, "Samples from the top_k most likely tokens; 0 or -1 for all.")
    stop_sequences: str | None = given(
        None,
        "Comma-separated strings that end the output, which holds what is before"
        " them. Defaults to the server's STOP_SEQUENCES.",
    )
    length_penalty: float = given(
        1.0, "Favours longer output above 1 and shorter below, in beam search."
    )
    presence_penalty: float = given(0.0, "Penalizes tokens that have been generated at all.")
    frequency_penalty: float = given(0.0, "Penalizes tokens by how often they have been generated.")
    repetition_penalty: float = given(
        1.0, "Divides the likelihood of tokens that occurred; 1 is neutral."
    )
    seed: int | None = given(
        None,
        "Random seed, 0 included. Leave blank, or -1, for a random one, which is logged.",
    )
    prompt_template: str | None = given(
        None,
        "Python format string with {prompt}, and {system_prompt} if wanted."
        " Defaults to the server's PROMPT_TEMPLATE, else to the model's chat template."
        " '{prompt}' sends the prompt as it is.",
    )
    log_performance_metrics: bool = given(
        False, "Log token counts, tokens per second and time to first token."
    )
    max_new_tokens: int | None = given(None, "Old name of max_tokens. Both may not be set.", ge=1)
    min_new_tokens: int | None = given(None, "Old name of min_tokens. Both may not be set.", ge=-1)
    messages: list[dict[str, Any]] | None = given(  # noqa: RUF009 - a field
        None,
        "Chat instead of a prompt: objects with role (system, user, assistant) and"
        " content, put into the model's own chat template.",
    )
    lora_name: str | None = given(
        None,
        "LoRA adapter to generate with, by the name that the server gives it."
        " Leave blank for the base model.",
    )

    def sampling(self, defaults: Mapping[str, float] = MappingProxyType({})) -> SamplingParams:
        """Sampling parameters, with a random seed if none was given; raises E1005, E1101, E1102.

        Those that are no input are the model's `defaults`.
        """
        values: dict[str, Any] = dict(defaults)
        values |= {name: item.read(getattr(self, name)) for name, item in INPUTS.items()}
        values["max_tokens"] = self._max_tokens()
        values["min_tokens"] = min(self._min_tokens(), self._max_tokens())
        return SamplingParams(**values)

    def checked(self) -> Self:
        """The inputs once they fit together; raises the coded error if they do not."""
        return self

    @property
    def of_engine(self) -> dict[str, Any]:
        """Inputs that only this engine has."""
        return {}

    @property
    def piece_size(self) -> float:
        """Tokens that a piece of text has at least."""
        return 0.0

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
