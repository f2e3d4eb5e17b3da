"""Cog predictor of the mock server: the runner's inputs plus those that control the mock engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from cog import ConcatenateIterator

from cog_triton.engines.mock.family import MockFamily
from cog_triton.errors import InvalidArgument, InvalidArgumentMaxTokens
from cog_triton.serving.coglet import concurrent_streaming
from cog_triton.serving.generate import Generation
from cog_triton.serving.prediction_inputs import (
    DEFAULT_MAX_TOKENS,
    PredictionInputs,
    given,
    takes,
)
from cog_triton.serving.predictor import Predictor
from cog_triton.settings import Settings, load_settings
from cog_triton.system import log_format

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
        given_chat = self.messages is not None and self.prompt == _PROMPT
        # The original's performance script reads the metrics.
        found = replace(
            self, prompt="" if given_chat else self.prompt, log_performance_metrics=True
        )
        if self.n_output_tokens is None:
            return found
        count = int(self.n_output_tokens)
        for name in ("max_tokens", "max_new_tokens", "min_tokens", "min_new_tokens"):
            value = getattr(self, name)
            if value not in (None, count) and (name, value) != ("max_tokens", DEFAULT_MAX_TOKENS):
                raise InvalidArgumentMaxTokens(
                    f"Can't set both n_output_tokens ({count}) and {name} ({value})"
                )
        return replace(
            found, max_tokens=count, min_tokens=count, max_new_tokens=None, min_new_tokens=None
        )

    @property
    def of_engine(self) -> dict[str, Any]:
        """Inputs that only the mock engine has; Triton refuses 2.0 for an integer."""
        after = int(self.inject_after) if self.inject else None
        found = {"tps": self.tps, "inject": self.inject, "inject_after": after}
        return {name: value for name, value in found.items() if value is not None}


class MockPredictor(Predictor):
    """Predictor with the inputs of the original's mock server besides its own."""

    def _load_settings(self) -> Settings:
        return load_settings(cog_triton_engine="mock")

    @takes(MockInputs)
    async def run(self, **inputs: Any) -> ConcatenateIterator[str]:
        """Validate the inputs, and return the stream of text, buffered as requested."""
        log_format.request_id.set(concurrent_streaming.prediction_id())
        with self._reporting_rejections():
            asked = MockInputs(**self._with_defaults(inputs)).checked()
        chunk_size = {"yield": 0.0, "wait": math.inf}.get(
            asked.output_method, asked.buffer_size or 0.0
        )

        def transform(
            chunks: Generator[str, None, None], generation: Generation
        ) -> Generator[str, None, None]:
            if chunk_size:
                result = generation.result
                chunks = buffered(chunks, lambda: result.output_token_count, chunk_size)
            yield from chunks
            self._report_expected(generation)

        return self.stream(asked, asked.of_engine, transform)

    def _report_expected(self, generation: Generation) -> None:
        """Report the times that the mock was to keep, next to the measured ones; none at 0 tps."""
        defaults = cast(MockFamily, self._runtime.family).defaults
        tps = defaults.rate(generation.request.engine_inputs.get("tps"))
        if not tps:
            return
        count = generation.result.output_token_count
        prefill = defaults.prefill_ms * len(generation.request.engine.input_ids) / 1000
        first = prefill + min(defaults.tokens_per_response, count) / tps
        duration = prefill + count / tps
        self.record_metric("expected_tokens_per_second", tps)
        self.record_metric("expected_duration", duration)
        self.record_metric("expected_time_to_first_token", first)
        print(f"Expected tokens per second: {tps:g}")
        print(f"Expected execution time: {duration:.2f} seconds")
        print(f"Expected time to first token: {first:.2f} seconds")


def buffered(
    chunks: Generator[str, None, None], arrived: Callable[[], int], size: float
) -> Generator[str, None, None]:
    """Merge `chunks` into larger ones of at least `size` tokens each, except the last.

    `arrived` returns the number of tokens so far. Closing it closes `chunks`.
    """
    text: list[str] = []
    taken = 0
    with closing(chunks):
        for chunk in chunks:
            text.append(chunk)
            count = arrived()
            if count - taken >= size:
                yield "".join(text)
                text, taken = [], count
        if text:
            yield "".join(text)
