"""Cog predictor of the runner: inputs of /predictions, named as in the original cog-triton."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cog import BaseRunner, ConcatenateIterator

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import BadMessages, CogTritonError
from cog_triton.serving import drain_watch, tenants
from cog_triton.serving.admission import Ticket
from cog_triton.serving.coglet import concurrent_streaming
from cog_triton.serving.generate import Generation, Stream
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.openai.listeners import HTTPListeners, model_name
from cog_triton.serving.prediction_inputs import INPUTS, PredictionInputs, takes
from cog_triton.serving.runtime import Runtime
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.settings import Settings, load_settings
from cog_triton.system import log_format, process_tuning
from cog_triton.system.log_format import STDERR, DescriptorHandler
from cog_triton.system.process_state import exit_with_parent, stop_parent
from cog_triton.text import chat, prompts
from cog_triton.text.prompts import RenderedPrompt
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.stop_strings import WordLimits, parse_stop_sequences


def inherited_stderr() -> int:
    """File descriptor of the stderr that Cog's server was started with.

    coglet 0.23.1 replaces the worker's stderr by a pipe, and wraps every line that it reads there;
    but it keeps the inherited one open under another number, which is recognized by being the
    same file as our parent's stderr.
    """
    with suppress(OSError):
        wanted = Path(f"/proc/{os.getppid()}/fd/{STDERR}").stat()
        for name in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
            descriptor = int(name.name)
            with suppress(OSError):
                if descriptor > STDERR and os.path.samestat(os.fstat(descriptor), wanted):
                    return descriptor
    return STDERR


@contextmanager
def setup_log() -> Iterator[None]:
    """Log lines during setup go to stdout, which coglet makes `setup.logs` of /health-check.

    coglet logs them, too, all as INFO: the process's own handler adds only warnings and errors.
    """
    copies = logging.StreamHandler(sys.stdout)
    copies.setFormatter(_SetupLogFormatter())
    root = logging.getLogger()
    own = [handler for handler in root.handlers if isinstance(handler, DescriptorHandler)]
    root.addHandler(copies)
    for handler in own:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler in own:
            handler.setLevel(logging.NOTSET)
        root.removeHandler(copies)


class _SetupLogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.title()}: {text}"


_ENDPOINT = "predictions"
Transform = Callable[[Generator[str, None, None], Generation], Generator[str, None, None]]


class Predictor(BaseRunner):  # type: ignore[misc]
    """Streams text for one prompt; concurrent predictions share the engine's in-flight batch."""

    async def setup(self, weights: str | None = None) -> None:
        """Start the runtime and the HTTP listeners; an exception makes Cog report SETUP_FAILED."""
        exit_with_parent()
        process_tuning.limit_arenas()
        concurrent_streaming.disable_interrupts()
        concurrent_streaming.install(type(self).run)
        settings = self._load_settings()
        log_format.configure(settings.log_format, settings.log_level, inherited_stderr())
        with setup_log():
            await self._start(settings, weights)
        process_tuning.tune_for_serving()
        process_tuning.trim_periodically()

    async def _start(self, settings: Settings, weights: str | None) -> None:
        self._telemetry = CompositeObserver(settings)
        listeners = HTTPListeners(settings, self._telemetry)
        self._runtime = await Runtime.start(
            settings, weights, on_failed=stop_parent, observer=self._telemetry
        )
        listeners.serve_runtime(self._runtime)
        drain_watch.start(settings.port, settings.cog_triton_drain_file, self._runtime.drain)

    def _load_settings(self) -> Settings:
        return load_settings()

    async def healthcheck(self) -> bool:
        """Whether predictions are served; else raises the error that /health-check shows."""
        self._runtime.require_ready()
        return True

    @takes(PredictionInputs)
    async def run(self, **inputs: Any) -> ConcatenateIterator[str]:
        """Validate the inputs, and return the stream of text; awaits nothing."""
        return self.stream(PredictionInputs(**self._with_defaults(inputs)))

    def stream(
        self,
        inputs: PredictionInputs,
        engine_inputs: Mapping[str, Any] = MappingProxyType({}),
        transform: Transform = lambda chunks, generation: chunks,
    ) -> ConcatenateIterator[str]:
        """The stream of text for coglet; raises the coded error of invalid sampling parameters.

        `engine_inputs` are inputs that only this engine has; `transform` may change the stream.
        """
        door = self._runtime.settings.cog_triton_drain_file
        check_id, _, _ = concurrent_streaming.prediction_id().partition(".")
        if door is not None and check_id == door.name:
            return concurrent_streaming.cancellable_stream(self._check(), lambda: None)
        if self._runtime.settings.cog_triton_tenants_at_door:
            tenants.CURRENT.set(tenants.decoded(self.scope.context.get(tenants.HEADER)))
        with self._reporting_rejections():
            self._runtime.generator.tenant_limits.begin(tenants.CURRENT.get())
            self._runtime.family.abilities.require_generation()
            sampling = inputs.sampling(self._runtime.sampling_defaults)
            notes = inputs.notes()
        ticket = Ticket()

        def chunks() -> Generator[str, None, None]:
            """Tokenize and generate, on the prediction's own thread."""
            with self._reporting_rejections():
                request = self._plan(self._render(inputs), sampling, inputs, engine_inputs, notes)
            stream = self._runtime.generator.stream(request, ticket)
            log_metrics = (
                inputs.log_performance_metrics or self._runtime.settings.log_performance_metrics
            )
            yield from transform(self._generate(stream, log_metrics), stream.generation)

        return concurrent_streaming.cancellable_stream(chunks(), ticket.cancel)

    def _with_defaults(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A request's inputs and the model's defaults, which precede those that Cog declares."""
        defaults = self._runtime.sampling_defaults.items()
        return {name: value for name, value in defaults if name in INPUTS} | dict(inputs)

    def _check(self) -> Generator[str, None, None]:
        """Answer to the front door's own prediction, whose id no client knows; it is not counted.

        Any engine has one, such as of embeddings alone.
        """
        self._runtime.generator.probe()
        yield "ready"

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

    def _plan(
        self,
        rendered: RenderedPrompt,
        sampling: SamplingParams,
        inputs: PredictionInputs,
        engine_inputs: Mapping[str, Any],
        notes: Sequence[str],
    ) -> GenerationRequest:
        settings, runtime = self._runtime.settings, self._runtime
        stop_sequences = inputs.stop_sequences
        if inputs.lora_name:
            runtime.require_adapter(inputs.lora_name)
        if (tenant := tenants.CURRENT.get()) is not None and tenant.models:
            tenant.require_model(inputs.lora_name or model_name(runtime))
        if stop_sequences is None:
            stops = parse_stop_sequences(settings.stop_sequences)
        else:
            limits = WordLimits(settings.max_stop_sequences, settings.max_stop_length)
            stops = limits.parse("stop_sequences", stop_sequences)
        generator = runtime.generator
        ids = generator.encode(rendered.text, add_special_tokens=rendered.add_special_tokens)
        return generator.plan(
            EngineRequest(input_ids=ids, sampling=sampling, adapter=inputs.lora_name or None),
            stops,
            notes=(*notes, *rendered.warnings),
            id=concurrent_streaming.prediction_id(),
            endpoint=_ENDPOINT,
            engine_inputs=dict(engine_inputs),
        )

    @contextmanager
    def _reporting_rejections(self) -> Iterator[None]:
        try:
            yield
        except CogTritonError as error:
            log_format.request_id.set(concurrent_streaming.prediction_id())
            self._telemetry.refused(_ENDPOINT, error)
            raise

    def _generate(self, stream: Stream, log_metrics: bool) -> Generator[str, None, None]:
        """Generated text; then records metrics, and prints to the prediction's own log."""
        request, result = stream.generation.request, stream.generation.result
        notes = [f"Note: {note}" for note in request.notes]
        notes.append(f"Random seed used: `{request.engine.sampling.seed}`")
        if request.engine.sampling.greedy:
            notes.append("Note: Random seed will not impact output if greedy decoding is used.")
        print("\n".join(notes))
        yield from stream
        metrics = {
            "queue_time": result.queue_time or 0.0,
            "input_token_count": result.prompt_tokens(request),
            "output_token_count": result.output_token_count,
            "tokens_per_second": result.tokens_per_second,
            "time_to_first_token": result.time_to_first_token,
            "finish_reason": result.finish_reason,
        }
        scope = self.scope
        for name, value in metrics.items():
            if value is not None:
                scope.record_metric(name, value)
        print("\n".join(_summary_lines(result, log_metrics)))


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
