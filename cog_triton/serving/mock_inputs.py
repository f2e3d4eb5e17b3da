"""Inputs of a prediction of the mock engine: the runner's, and those that control the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from cog_triton.errors import InvalidArgument, InvalidArgumentMaxTokens
from cog_triton.serving.prediction_inputs import DEFAULT_MAX_TOKENS, PredictionInputs, given

_PROMPT = "Tell me about the sea."


@dataclass(frozen=True, slots=True, kw_only=True)
class MockInputs(PredictionInputs):
    """The runner's inputs, and those of the original's mock server."""

    prompt: str = given(
        _PROMPT, "Prompt, of which only the length in tokens matters; or send messages."
    )
    tps: float | None = given(
        None,
        "Tokens per second of this request, 0 for as many as the path takes."
        " Defaults to the server's --tps.",
        ge=0,
    )
    n_output_tokens: int | None = given(
        None, "How many tokens to generate: min_tokens and max_tokens in one.", ge=1
    )
    output_method: str = given(
        "yield",
        "yield: text as it is generated; wait: all of it at the end; buffer: in"
        " pieces of buffer_size tokens.",
        choices=["yield", "wait", "buffer"],
    )
    buffer_size: int | None = given(
        None, "Tokens of a piece with output_method buffer; more if they come together.", ge=1
    )
    inject: str | None = given(
        None,
        "Break something: error fails this request, crash kills the engine's"
        " process, hang stops the engine for everyone.",
        choices=["error", "crash", "hang"],
    )
    inject_after: int = given(0, "After how many output tokens `inject` happens.", ge=0)

    def checked(self) -> Self:
        """The inputs with the length that they ask for; raises E1005, E1102 if they contradict."""
        if self.output_method == "buffer" and self.buffer_size is None:
            raise InvalidArgument("buffer_size: missing; output_method=buffer needs it")
        if self.output_method != "buffer" and self.buffer_size is not None:
            raise InvalidArgument(f"buffer_size={self.buffer_size}: only with output_method=buffer")
        if self.inject is None and self.inject_after:
            raise InvalidArgument(f"inject_after={self.inject_after}: only with inject")
        # The original's performance script reads the metrics.
        own: dict[str, Any] = {"log_performance_metrics": True}
        if self.messages is not None and self.prompt == _PROMPT:
            own["prompt"] = ""
        if self.n_output_tokens is not None:
            count = int(self.n_output_tokens)
            for name in ("max_tokens", "max_new_tokens", "min_tokens", "min_new_tokens"):
                value = getattr(self, name)
                if value not in (None, count, DEFAULT_MAX_TOKENS if name == "max_tokens" else None):
                    raise InvalidArgumentMaxTokens(
                        f"Can't set both n_output_tokens ({count}) and {name} ({value})"
                    )
            own |= {"max_tokens": count, "min_tokens": count}
            own |= {"max_new_tokens": None, "min_new_tokens": None}
        return replace(self, **own)

    @property
    def of_engine(self) -> dict[str, Any]:
        """Inputs that only the mock engine has; Triton refuses 2.0 for an integer."""
        after = int(self.inject_after) if self.inject else None
        found = {"tps": self.tps, "inject": self.inject, "inject_after": after}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def piece_size(self) -> float:
        """Tokens that a piece of text has at least; infinite for all text in one piece."""
        return math.inf if self.output_method == "wait" else float(self.buffer_size or 0)
