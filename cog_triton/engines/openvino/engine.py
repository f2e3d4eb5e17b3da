"""OpenVINO engine: OpenVINO GenAI's ContinuousBatchingPipeline as a `StepEngine`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import openvino as ov
import openvino_genai as og

from cog_triton.engines.base import options_of
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.openvino.family import KV_BYTES, OpenVINOOptions, read_config
from cog_triton.engines.openvino.guides import adapted, check
from cog_triton.engines.request import (
    EngineRequest,
    FinishReason,
    TokenEvent,
    check_prompt,
    note_length_penalty,
)
from cog_triton.engines.stop_words import StopWords, Tokens
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    Overloaded,
    TritonUnknownError,
)
from cog_triton.text.sampling import SamplingParams

# Without these OpenVINO quantizes activations to int8, which a 135M-parameter model does not
# survive; with them greedy output equals float32's.
_FULL_PRECISION = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}

_GUIDE_FIELDS = {"structural_tag": "structural_tags_config"}
_BLOCK_SIZE = 32  # OpenVINO's, in tokens, on every CPU


_MOST_MIN_P = 1 - 2**-20
"""OpenVINO takes less than 1; it leaves only tokens that are as likely as the likeliest."""


@dataclass(slots=True)
class _RunningRequest:
    handle: Any
    request: EngineRequest
    end_ids: Set[int]
    output: StopWords
    prompt_left: int = 0
    """Tokens of the prompt that it tells before those of the output."""


class OpenVINOPipeline:
    """OpenVINO pipeline of one engine directory; see `cog_triton.engines.base.StepEngine`."""

    waits_for_readers = False

    def __init__(self, directory: Path, options: OpenVINOOptions) -> None:
        self._config = read_config(directory)
        self.max_batch_size = options.max_batch_size or self._config.max_batch_size
        scheduler = og.SchedulerConfig()
        scheduler.max_num_seqs = self.max_batch_size
        scheduler.max_num_batched_tokens = options.max_num_batched_tokens
        scheduler.cache_size = options.kv_cache_gb
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = options.enable_kv_cache_reuse
        properties: dict[str, Any] = dict(_FULL_PRECISION)
        properties["KV_CACHE_PRECISION"] = options.kv_cache_precision
        self._kv_bytes = KV_BYTES[options.kv_cache_precision]
        if options.num_threads:
            properties["INFERENCE_NUM_THREADS"] = options.num_threads
        self._pipeline = og.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)
        self._running: dict[int, _RunningRequest] = {}
        self._events: list[tuple[int, TokenEvent]] = []

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Self:
        """Open the engine that a rendered model's parameters describe."""
        engine = cls(Path(parameters["engine_dir"]), OpenVINOOptions.parse(options_of(parameters)))
        engine.warm_up()
        return engine

    def warm_up(self) -> None:
        """Generate a token: the first request has the KV cache allocated and kernels chosen."""
        request = EngineRequest(input_ids=[0], sampling=SamplingParams(max_tokens=1))
        self.submit(0, request)
        while self._running:
            self.step()

    def wait_s(self) -> float | None:
        return 0.0 if self._running or self._events else None

    def submit(self, handle: int, request: EngineRequest) -> None:
        """See `StepEngine.submit`; the prompt and output together must fit max_seq_len."""
        end_ids = request.end_ids(frozenset(self._config.eos_ids))
        self._check(request)
        request = request.as_prompt()
        ids = np.asarray(request.input_ids, dtype=np.int64)
        config = _generation_config(request, end_ids)
        try:
            added = self._pipeline.add_request(handle, ov.Tensor(ids.reshape(1, -1)), config)
        except RuntimeError as error:
            raise TritonUnknownError(_reason(error)) from error
        output = StopWords(request.stop_words, request.sampling.min_tokens)
        echoed = len(ids) if request.prompt_log_probs else 0
        self._running[handle] = _RunningRequest(added, request, end_ids, output, echoed)

    def cancel(self, handle: int) -> None:
        """See `StepEngine.cancel`."""
        running = self._running.get(handle)
        if running is not None:
            running.handle.cancel()
            self._finish(handle, running, "cancelled")

    def step(self) -> list[tuple[int, TokenEvent]]:
        """See `StepEngine.step`. Holds the GIL while it computes, as OpenVINO's binding does."""
        try:
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
        except RuntimeError as error:
            for handle, running in list(self._running.items()):
                running.handle.cancel()
                self._fail(handle, TritonUnknownError(_reason(error)))
        for handle, running in list(self._running.items()):
            self._read_tokens(handle, running)
        events, self._events = self._events, []
        return events

    def kv_cache(self) -> KVCacheStats:
        """See `StepEngine.kv_cache`. OpenVINO tells that of its last step, in percent."""
        metrics = self._pipeline.get_metrics()
        usage = metrics.cache_usage / 100 if self._running else 0.0
        blocks = None  # the cache is made with the first request
        block_bytes = self._kv_bytes * (self._config.kv_values_per_token or 0) * _BLOCK_SIZE
        if metrics.cache_size_in_bytes and block_bytes:
            blocks = metrics.cache_size_in_bytes // block_bytes
        return KVCacheStats(usage, _BLOCK_SIZE, blocks)

    def _check(self, request: EngineRequest) -> None:
        config = self._config
        check_prompt(
            request,
            max_seq_len=config.max_seq_len,
            max_input_len=config.max_input_len,
            vocab_size=config.vocab_size,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(request.sampling, name)
            if not -2 <= value <= 2:
                raise InvalidArgument(f"{name}={value}: must be from -2 to 2 on this engine")
        if request.bad_words:
            raise InvalidArgument("bad_words_list: this engine does not support bad_words_list")
        if request.top_log_probs:
            raise InvalidArgument("top_log_probs: this engine tells those of chosen tokens alone")
        note_length_penalty(request)

    def _read_tokens(self, handle: int, running: _RunningRequest) -> None:
        output = running.output
        while running.handle.can_read():
            for read in running.handle.read().values():
                read_ids, read_log_probs = read.generated_ids, read.generated_log_probs
                if size := min(running.prompt_left, len(read_ids)):
                    running.prompt_left -= size
                    prompt = TokenEvent(read_ids[:size], read_log_probs[:size], of_prompt=True)
                    self._events.append((handle, prompt))
                    read_ids, read_log_probs = read_ids[size:], read_log_probs[size:]
                for token, log_prob in zip(read_ids, read_log_probs, strict=True):
                    if token not in running.end_ids and output.add(token, log_prob):
                        running.handle.cancel()
                        self._finish(handle, running, "stop")
                        return
        if running.handle.get_status() != og.GenerationStatus.RUNNING:
            self._complete(handle, running)
        elif ready := output.ready():
            self._emit(handle, ready)

    def _complete(self, handle: int, running: _RunningRequest) -> None:
        if running.handle.get_status() == og.GenerationStatus.IGNORED:
            self._fail(handle, Overloaded("the KV cache is exhausted; try again later"))
        elif running.output.count >= running.request.sampling.max_tokens:
            self._finish(handle, running, "length")
        else:
            self._finish(handle, running, "stop")

    def _finish(self, handle: int, running: _RunningRequest, reason: FinishReason) -> None:
        del self._running[handle]
        self._emit(handle, running.output.rest(), reason)

    def _fail(self, handle: int, error: CogTritonError) -> None:
        del self._running[handle]
        self._events.append((handle, TokenEvent([], [], error=error)))

    def _emit(self, handle: int, tokens: Tokens, finish: FinishReason | None = None) -> None:
        ids = [token for token, _ in tokens]
        self._events.append((handle, TokenEvent(ids, [p for _, p in tokens], finish)))


def _generation_config(request: EngineRequest, end_ids: Set[int]) -> Any:
    sampling = request.sampling
    config = og.GenerationConfig()
    config.apply_chat_template = False
    values = sampling.arguments("openvino")
    if not values.get("top_k"):
        values.pop("top_k", None)  # all tokens are its default
    for name, value in values.items():
        setattr(config, name, value)
    if end_ids:
        config.eos_token_id = min(end_ids)
        config.stop_token_ids = set(end_ids)
    else:
        config.ignore_eos = True
    config.logprobs = int(request.return_log_probs)
    config.echo = request.prompt_log_probs
    config.do_sample = not sampling.greedy
    if config.do_sample:
        config.min_p = min(sampling.min_p, _MOST_MIN_P)
        config.rng_seed = sampling.seed
    if request.guide is not None:
        check(request.guide, "guided_decoding_guide")
        guide = og.StructuredOutputConfig()
        kind = _GUIDE_FIELDS.get(request.guide.kind, request.guide.kind)
        setattr(guide, kind, adapted(request.guide))
        config.structured_output_config = guide
    try:
        config.validate()
    except RuntimeError as error:
        raise InvalidArgument(_reason(error)) from error
    return config


def _reason(error: RuntimeError) -> str:
    """The last line of an OpenVINO message; those before it hold source positions."""
    return str(error).strip().splitlines()[-1]
