"""The Cog predictor of the mock server: the runner's, and what each request wants of the engine."""

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
from cog_triton.serving.predictor import DEFAULT_MAX_TOKENS, Predictor
from cog_triton.settings import Settings, load_settings
from cog_triton.system import log_format
from cog_triton.text.prompts import RenderedPrompt
from cog_triton.text.sampling import SamplingParams

_PROMPT = "Tell me about the sea."


def _beside(others: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Give a method the inputs of `others`, too, where Cog looks: it takes no ``**inputs``.

    What a request leaves out Cog leaves out as well, and `_defaults` has.
    """

    def give(method: Callable[..., Any]) -> Any:
        own = inspect.signature(method)
        theirs = inspect.signature(others).parameters
        named = {n: p for n, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        parameters = {**theirs, **named}
        method.__annotations__ = {
            **typing.get_type_hints(others),
            **typing.get_type_hints(method),
        }
        method.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[
                p.replace(annotation=method.__annotations__.get(n, p.empty))
                for n, p in parameters.items()
            ]
        )
        return method

    return give


def _defaults(method: Callable[..., Any]) -> dict[str, Any]:
    """What the inputs of a predictor's method are unless a request has them."""
    parameters = inspect.signature(method).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {n: v.default if isinstance(v, FieldInfo) else v for n, v in found.items()}


_RUNNERS = _defaults(Predictor.run)


class MockPredictor(Predictor):
    """Takes the inputs of the seed's mock server beside those of `Predictor`."""

    def _load_settings(self) -> Settings:
        return load_settings(cog_triton_engine="mock")

    @_beside(Predictor.run)
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
        """Validate, tokenize, and return the stream of text, in pieces as asked for."""
        log_format.request_id.set(concurrent_streaming.prediction_id())
        inputs = {**_RUNNERS, **inputs}
        with self._telling_of_refusal():
            if output_method == "buffer" and buffer_size is None:
                raise InvalidArgument("buffer_size: missing; output_method=buffer needs it")
            if output_method != "buffer" and buffer_size is not None:
                raise InvalidArgument(f"buffer_size={buffer_size}: only with output_method=buffer")
            if inject is None and inject_after:
                raise InvalidArgument(f"inject_after={inject_after}: only with inject")
            if n_output_tokens is not None:
                inputs |= _exactly(int(n_output_tokens), inputs)
        # Cog takes 2.0 for an integer and hands it on as a float, and Triton would not.
        engine_inputs = {
            "tps": tps,
            "inject": inject,
            "inject_after": int(inject_after) if inject else None,
        }
        request = _Request(
            self,
            {name: value for name, value in engine_inputs.items() if value is not None},
            {"yield": 0.0, "wait": math.inf}.get(output_method, buffer_size or 0.0),
        )
        if inputs["messages"] is not None and prompt == _PROMPT:
            prompt = ""
        inputs["log_performance_metrics"] = True  # the seed's performance script reads them
        return await Predictor.run(request, **{**inputs, "prompt": prompt})


def _exactly(count: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that have `count` tokens generated; raises E1102 for those that say otherwise."""
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


class _Request(Predictor):
    """The predictor for one request, over the same runtime."""

    def __init__(
        self, predictor: Predictor, engine_inputs: dict[str, Any], piece_size: float
    ) -> None:
        self.__dict__.update(predictor.__dict__)
        self._engine_inputs = engine_inputs
        self._piece_size = piece_size

    def _plan(
        self, rendered: RenderedPrompt, sampling: SamplingParams, stop_sequences: str | None
    ) -> Generation:
        generation = super()._plan(rendered, sampling, stop_sequences)
        generation.engine_inputs = self._engine_inputs
        return generation

    def _report(self, generation: Generation, log_metrics: bool) -> Generator[str, None, None]:
        chunks = super()._report(generation, log_metrics)
        if self._piece_size:
            chunks = pieces(chunks, _Count(generation), self._piece_size)
        yield from chunks
        self._tell_expected(generation)

    def _tell_expected(self, generation: Generation) -> None:
        """What the engine was to do, beside what was measured; nothing if it was to hurry."""
        defaults = cast(MockFamily, self._runtime.family).defaults
        tps = self._engine_inputs.get("tps", defaults.tps)
        if not tps:
            return
        count = generation.output_token_count
        prefill = defaults.prefill_ms * len(generation.input_ids) / 1000
        first = prefill + min(defaults.tokens_per_response, count) / tps
        duration = prefill + count / tps
        self.record_metric("expected_tokens_per_second", tps)
        self.record_metric("expected_duration", duration)
        self.record_metric("expected_time_to_first_token", first)
        print(f"Expected tokens per second: {tps:g}")
        print(f"Expected execution time: {duration:.2f} seconds")
        print(f"Expected time to first token: {first:.2f} seconds")


class _Count:
    """How many tokens of a generation have arrived."""

    def __init__(self, generation: Generation) -> None:
        self._arrivals = generation.arrivals
        self._seen = self._count = 0

    def __call__(self) -> int:
        self._count += sum(count for _, count in self._arrivals[self._seen :])
        self._seen = len(self._arrivals)
        return self._count


def pieces(
    chunks: Generator[str, None, None], arrived: Callable[[], int], size: float
) -> Generator[str, None, None]:
    """The text of `chunks` in pieces of at least `size` tokens, but for the last one.

    `arrived` counts the tokens so far. Closing it closes `chunks`.
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
