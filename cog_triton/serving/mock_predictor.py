"""Cog predictor of the mock server: the runner's inputs plus those that control the mock engine."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, cast

from cog import ConcatenateIterator, Input
from cog.input import FieldInfo

from cog_triton.engines.mock.family import MockFamily
from cog_triton.errors import InvalidArgument, InvalidArgumentMaxTokens
from cog_triton.serving.coglet import concurrent_streaming
from cog_triton.serving.generate import Generation
from cog_triton.serving.prediction_inputs import DEFAULT_MAX_TOKENS, PredictionInputs
from cog_triton.serving.predictor import Predictor
from cog_triton.settings import Settings, load_settings
from cog_triton.system import log_format

_PROMPT = "Tell me about the sea."


def _with_inputs_of(others: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: adds the inputs of `others` to a method's signature, in place of ``**inputs``.

    Cog does not pass inputs that a request leaves out; their defaults are in `_defaults`.
    """

    def decorate(method: Callable[..., Any]) -> Any:
        signature = inspect.signature(method)
        other_parameters = inspect.signature(others).parameters
        named = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        parameters = {**other_parameters, **named}
        method.__annotations__ = {
            **typing.get_type_hints(others),
            **typing.get_type_hints(method),
        }
        method.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                p.replace(annotation=method.__annotations__.get(n, p.empty))
                for n, p in parameters.items()
            ]
        )
        return method

    return decorate


def _defaults(method: Callable[..., Any]) -> dict[str, Any]:
    """Default values of the inputs of a predictor's method."""
    parameters = inspect.signature(method).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {n: v.default if isinstance(v, FieldInfo) else v for n, v in found.items()}


_RUNNER_DEFAULTS = _defaults(Predictor.run)


class MockPredictor(Predictor):
    """Predictor with the inputs of the original's mock server besides its own."""

    def _load_settings(self) -> Settings:
        return load_settings(cog_triton_engine="mock")

    @_with_inputs_of(Predictor.run)
    async def run(
        self,
        prompt: str = Input(
            default=_PROMPT,
            description="Prompt, of which only the length in tokens matters; or send messages.",
        ),
        tps: float | None = Input(
            default=None,
            ge=0,
            description="Tokens per second of this request, 0 for as many as the path takes."
            " Defaults to the server's --tps.",
        ),
        n_output_tokens: int | None = Input(
            default=None,
            ge=1,
            description="How many tokens to generate: min_tokens and max_tokens in one.",
        ),
        output_method: str = Input(
            default="yield",
            choices=["yield", "wait", "buffer"],
            description="yield: text as it is generated; wait: all of it at the end; buffer: in"
            " pieces of buffer_size tokens.",
        ),
        buffer_size: int | None = Input(
            default=None,
            ge=1,
            description="Tokens of a piece with output_method buffer; more if they come together.",
        ),
        inject: str | None = Input(
            default=None,
            choices=["error", "crash", "hang"],
            description="Break something: error fails this request, crash kills the engine's"
            " process, hang stops the engine for everyone.",
        ),
        inject_after: int = Input(
            default=0, ge=0, description="After how many output tokens `inject` happens."
        ),
        **inputs: Any,
    ) -> ConcatenateIterator[str]:
        """Validate the inputs, and return the stream of text, buffered as requested."""
        log_format.request_id.set(concurrent_streaming.prediction_id())
        inputs = {**_RUNNER_DEFAULTS, **inputs}
        with self._reporting_rejections():
            if output_method == "buffer" and buffer_size is None:
                raise InvalidArgument("buffer_size: missing; output_method=buffer needs it")
            if output_method != "buffer" and buffer_size is not None:
                raise InvalidArgument(f"buffer_size={buffer_size}: only with output_method=buffer")
            if inject is None and inject_after:
                raise InvalidArgument(f"inject_after={inject_after}: only with inject")
            if n_output_tokens is not None:
                inputs |= _exact_length(int(n_output_tokens), inputs)
        # Cog takes 2.0 for an integer and passes it on as a float, which Triton refuses.
        engine_inputs = {
            "tps": tps,
            "inject": inject,
            "inject_after": int(inject_after) if inject else None,
        }
        if inputs["messages"] is not None and prompt == _PROMPT:
            prompt = ""
        inputs["log_performance_metrics"] = True  # the original's performance script reads them
        chunk_size = {"yield": 0.0, "wait": math.inf}.get(output_method, buffer_size or 0.0)

        def transform(
            chunks: Generator[str, None, None], generation: Generation
        ) -> Generator[str, None, None]:
            if chunk_size:
                chunks = buffered(chunks, _TokenCounter(generation), chunk_size)
            yield from chunks
            self._report_expected(generation)

        return self.stream(
            PredictionInputs(**{**inputs, "prompt": prompt}),
            {name: value for name, value in engine_inputs.items() if value is not None},
            transform,
        )

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


def _exact_length(count: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs for exactly `count` output tokens; raises E1102 if others contradict it."""
    for name in ("max_tokens", "max_new_tokens", "min_tokens", "min_new_tokens"):
        value = inputs.get(name)
        if value not in (None, count) and (name, value) != ("max_tokens", DEFAULT_MAX_TOKENS):
            raise InvalidArgumentMaxTokens(
                f"Can't set both n_output_tokens ({count}) and {name} ({value})"
            )
    return {
        "max_tokens": count,
        "max_new_tokens": None,
        "min_tokens": count,
        "min_new_tokens": None,
    }


class _TokenCounter:
    """Counts the tokens of a generation that have arrived."""

    def __init__(self, generation: Generation) -> None:
        self._arrivals = generation.result.arrivals
        self._seen = self._count = 0

    def __call__(self) -> int:
        self._count += sum(count for _, count in self._arrivals[self._seen :])
        self._seen = len(self._arrivals)
        return self._count


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
