"""Predictions of Cog: inputs named as in the original cog-triton in, pieces of text and a log out.

They run in the server, on its event loop. Cog's worker asks for them over the server's socket.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import BadMessages, CogTritonError
from cog_triton.serving import tenants
from cog_triton.serving.cog_messages import LOG, METRICS, OUTPUT, Predict
from cog_triton.serving.coglet import cog_server
from cog_triton.serving.generation import GenerationRequest, GenerationResult, Observer
from cog_triton.serving.mock_inputs import MockInputs
from cog_triton.serving.openai.sequences import Pieces, SequencePlan, Sequences
from cog_triton.serving.openai.served_applications import model_name
from cog_triton.serving.prediction_inputs import INPUTS, PredictionInputs
from cog_triton.serving.runtime import Runtime
from cog_triton.serving.tenants import Tenant
from cog_triton.system import log_format
from cog_triton.text import chat, prompts
from cog_triton.text.prompts import RenderedPrompt
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.stop_strings import WordLimits, parse_stop_sequences

Send = Callable[..., None]
"""See `Exchange.send`."""
_ENDPOINT = "predictions"
_BUSY_PER_S = 2000
_SAMPLE = 64
_LONGEST_S = 0.05
_EARLY_S = 10.0


class Prediction:
    """A prediction from its order on: it may be cancelled at any time, even before it runs."""

    def __init__(self) -> None:
        self.cancelled = False
        self.sequences: Sequences | None = None

    def cancel(self) -> None:
        """End it on behalf of its client."""
        self.cancelled = True
        if self.sequences is not None:
            self.sequences.cancel()


class Predictions:
    """Runs predictions on the engine of `runtime`; for its event loop alone."""

    def __init__(
        self,
        runtime: Runtime,
        observer: Observer,
        check_id: str,
        tenant_of: Callable[[str], Tenant | None],
    ) -> None:
        """The prediction of the id `check_id` is the server's own.

        `tenant_of` has the tenant of each id, if there are any; it raises E1007 for an id without.
        """
        self._runtime = runtime
        self._observer = observer
        self._check_id = check_id
        self._tenant_of = tenant_of
        self._merger = PieceMerger()
        self._running: defaultdict[str, set[Prediction]] = defaultdict(set)
        self._loop = asyncio.get_running_loop()
        self._recent: dict[str, tuple[float, bool]] = {}
        """When each id has ended, or whether it was cancelled before it came."""

    async def run(self, order: Predict, prediction: Prediction, send: Send) -> None:
        """Run one, and `send` what it brings; raises its coded error."""
        self._forget()
        _, cancelled = self._recent.pop(order.id, (0.0, False))
        self._running[order.id].add(prediction)
        if cancelled:
            prediction.cancel()
        try:
            if order.id.partition(".")[0] == self._check_id:
                # Any engine has one token or embedding; this is no request of a client.
                await self._runtime.generator.probe()
                send(OUTPUT, "ready")
                return
            log_format.request_id.set(order.id)
            await self._generate(order, prediction, send)
        finally:
            self._running[order.id].discard(prediction)
            if not self._running[order.id]:
                del self._running[order.id]
                self._recent[order.id] = self._loop.time(), False
                if prediction.cancelled:  # perhaps by the death of Cog's worker
                    cog_server.remove(order.id)

    def cancel(self, name: str) -> None:
        """Cancel those of an id, or the next one, if its order is still on its way.

        One that has just ended is not: its client may ask for the same id again.
        """
        self._forget()
        if name in self._running:
            for prediction in tuple(self._running[name]):
                prediction.cancel()
        elif name not in self._recent:
            self._recent[name] = self._loop.time(), True
            self._loop.call_later(_EARLY_S, self._forget)

    def _forget(self) -> None:
        """Forget ids that have ended, or were cancelled, longer ago than that.

        A prediction that has not come by then was ended by Cog, which has made directories for it.
        """
        while self._recent:
            oldest, (when, cancelled) = next(iter(self._recent.items()))
            if self._loop.time() - when < _EARLY_S:
                return
            del self._recent[oldest]
            if cancelled:
                cog_server.remove(oldest)

    async def _generate(self, order: Predict, prediction: Prediction, send: Send) -> None:
        runtime = self._runtime
        tenants.CURRENT.set(self._tenant_of(order.id))
        try:
            runtime.generator.tenant_limits.begin(tenants.CURRENT.get())
            runtime.family.abilities.require_generation()
            inputs, request = await asyncio.to_thread(self._plan, order)
        except CogTritonError as error:
            self._observer.refused(_ENDPOINT, error)
            raise
        output = Output(send, inputs.piece_size)
        plan = SequencePlan([request])
        sequences = Sequences(runtime.generator, plan)
        prediction.sequences = sequences
        if prediction.cancelled:  # before there was one to cancel; it is observed as any other
            sequences.cancel()
        result = sequences.generations[0].result

        def arrived(pieces: Pieces) -> bool:
            for _, piece in pieces:
                if piece is not None and piece.text:
                    self._merger.put(output, piece.text, piece.tokens, last=sequences.ended)
            return not sequences.ended

        send(LOG, "\n".join(_first_lines(request)))
        try:
            with sequences:
                await sequences.handle(arrived)
        finally:
            output.flush(math.inf)
        expected = _expected(runtime, request, result) if order.mock else {}
        send(METRICS, json.dumps(_metrics(request, result) | expected), waits=True)
        log_metrics = inputs.log_performance_metrics or runtime.settings.log_performance_metrics
        lines = [*_summary_lines(result, log_metrics), *_expected_lines(expected)]
        send(LOG, "\n".join(lines), waits=True)

    def _with_defaults(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A request's inputs and the model's defaults, which precede those that Cog declares."""
        defaults = self._runtime.sampling_defaults.items()
        return {name: value for name, value in defaults if name in INPUTS} | dict(inputs)

    def _plan(self, order: Predict) -> tuple[PredictionInputs, GenerationRequest]:
        """Fit a prediction into the engine's limits; a long prompt takes long, so on a thread."""
        settings, runtime = self._runtime.settings, self._runtime
        kind = MockInputs if order.mock else PredictionInputs
        inputs = kind(**self._with_defaults(order.inputs)).checked()
        sampling = inputs.sampling(runtime.sampling_defaults)
        rendered = self._render(inputs)
        if inputs.lora_name:
            runtime.require_adapter(inputs.lora_name)
        if (tenant := tenants.CURRENT.get()) is not None and tenant.models:
            tenant.require_model(inputs.lora_name or model_name(runtime))
        if inputs.stop_sequences is None:
            stops = parse_stop_sequences(settings.stop_sequences)
        else:
            limits = WordLimits(settings.max_stop_sequences)
            stops = limits.parse("stop_sequences", inputs.stop_sequences)
        generator = runtime.generator
        ids = generator.encode(rendered.text, add_special_tokens=rendered.add_special_tokens)
        planned = generator.plan(
            EngineRequest(input_ids=ids, sampling=sampling, adapter=inputs.lora_name or None),
            stops,
            notes=(*inputs.notes(), *rendered.warnings),
            id=order.id,
            endpoint=_ENDPOINT,
            engine_inputs=inputs.of_engine,
        )
        return inputs, planned

    def _render(self, inputs: PredictionInputs) -> RenderedPrompt:
        settings, tokenizer = self._runtime.settings, self._runtime.tokenizer
        default = settings.system_prompt
        system_prompt = default if inputs.system_prompt is None else inputs.system_prompt
        if inputs.messages is None:
            return prompts.render(
                inputs.prompt,
                system_prompt,
                request_template=inputs.prompt_template,
                default_template=settings.prompt_template,
                tokenizer=tokenizer,
            )
        for name in ("prompt", "prompt_template"):
            if getattr(inputs, name):
                raise BadMessages(f"messages and {name}: set one of them")
        messages = chat.parse_messages(inputs.messages, settings.max_messages)
        if inputs.system_prompt and any(message["role"] == "system" for message in messages):
            raise BadMessages("messages and system_prompt: there is a system message already")
        return chat.render_messages(messages, system_prompt, tokenizer)


class Output:
    """Text of one prediction on its way to Cog, in pieces of at least `size` tokens."""

    __slots__ = ("_send", "_size", "_taken", "begun", "text")

    def __init__(self, send: Send, size: float) -> None:
        self._send = send
        self._size = size
        self._taken = 0.0
        self.begun = False
        self.text = ""

    def flush(self, tokens: float) -> None:
        """Send the text, unless that makes the piece smaller than `size`; `tokens` are all so far.

        Infinitely many are the end.
        """
        if self.text and tokens - self._taken >= self._size:
            self._send(OUTPUT, self.text, waits=tokens == math.inf)
            self.text, self.begun, self._taken = "", True, tokens


class PieceMerger:
    """Makes a piece of two engine steps while all predictions together get 2000 a second.

    Each piece costs Cog and its worker more than all else that is done for a token. The first one
    of a prediction is sent at once, and no other waits longer than 50 ms.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Output, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._count, self._since = 0, 0.0
        self._busy = False

    def put(self, output: Output, text: str, tokens: int, *, last: bool = False) -> None:
        """Text of one engine step; `tokens` are those of the prediction so far.

        The `last` one goes with what is sent at the end.
        """
        self._count += 1
        if self._count == _SAMPLE:
            now = self._loop.time()
            self._busy = _BUSY_PER_S * (now - self._since) <= _SAMPLE
            self._count, self._since = 0, now
        output.text += text
        if last:
            return
        if self._busy and output.begun and output not in self._waiting:
            self._waiting[output] = tokens
            if self._timer is None:
                self._timer = self._loop.call_later(_LONGEST_S, self._flush)
        else:
            self._waiting.pop(output, None)
            output.flush(tokens)

    def _flush(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for output, tokens in waiting.items():
            output.flush(tokens)


def _first_lines(request: GenerationRequest) -> Iterator[str]:
    sampling: SamplingParams = request.engine.sampling
    yield from (f"Note: {note}" for note in request.notes)
    yield f"Random seed used: `{sampling.seed}`"
    if sampling.greedy:
        yield "Note: Random seed will not impact output if greedy decoding is used."


def _metrics(request: GenerationRequest, result: GenerationResult) -> dict[str, Any]:
    values = {
        "queue_time": result.queue_time or 0.0,
        "input_token_count": result.prompt_tokens(request),
        "output_token_count": result.output_token_count,
        "tokens_per_second": result.tokens_per_second,
        "time_to_first_token": result.time_to_first_token,
        "finish_reason": result.finish_reason,
    }
    return {name: value for name, value in values.items() if value is not None}


def _summary_lines(result: GenerationResult, log_metrics: bool) -> Iterator[str]:
    for tokens, waited in result.resumptions:
        yield f"Note: the engine died; resumed after {tokens} tokens, waited {waited:.1f} s"
    yield f"Finish reason: {result.finish_reason}"
    if log_metrics:
        yield f"Tokens processed: {result.output_token_count}"
        yield f"Serverside tokens per second: {result.tokens_per_second:.2f}"
        yield f"Serverside execution time: {result.duration:.2f} seconds"
        if (first := result.time_to_first_token) is not None:
            yield f"Serverside time to first token: {first:.2f} seconds"


def _expected(
    runtime: Runtime, request: GenerationRequest, result: GenerationResult
) -> dict[str, float]:
    """The times that the mock was to take; none at 0 tokens per second."""
    defaults = cast(MockFamily, runtime.family).defaults
    if not (tps := defaults.rate(request.engine_inputs.get("tps"))):
        return {}
    count = result.output_token_count
    prefill = defaults.prefill_ms * len(request.engine.input_ids) / 1000
    first = min(defaults.tokens_per_response, count) / tps
    return {
        "expected_tokens_per_second": tps,
        "expected_duration": prefill + count / tps,
        "expected_time_to_first_token": prefill + first,
    }


def _expected_lines(expected: Mapping[str, float]) -> Iterator[str]:
    if expected:
        tps, duration, first = expected.values()
        yield f"Expected tokens per second: {tps:g}"
        yield f"Expected execution time: {duration:.2f} seconds"
        yield f"Expected time to first token: {first:.2f} seconds"
