"""Prometheus metrics: TTFT, inter-token latency, queue time, token counts, outcomes, errors.

While a generation runs, only arrival times are recorded; everything is counted once it has ended.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cog_triton.errors import CogTritonError, TritonUnknownError
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry.platform_metrics import labelled
from cog_triton.serving.telemetry.tenant_metrics import TenantMetrics
from cog_triton.serving.tenants import CURRENT


class BatchHistogram(Collector):
    """Histogram over ascending upper bounds, `buckets`; one thread alone observes."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name, self._help = name, help_text
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe_many(self, values: Iterable[tuple[float, int]]) -> None:
        """Observe (value, count) pairs: each value so many times."""
        for value, count in values:
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        totals, total = itertools.accumulate(self._counts), self._sum
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, totals, strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=total)


_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
_LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """`Observer` of generations that exports metrics from its own registry."""

    def __init__(self) -> None:
        # Of a gauge beside each counter and histogram, which nothing reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token, queue included",
            _TTFT_BUCKETS,
        )
        self._inter_token_latency = BatchHistogram(
            "cog_triton_inter_token_latency_seconds",
            "Between two tokens of a stream; of tokens that came together, their share",
            _ITL_BUCKETS,
        )
        self.registry.register(self._inter_token_latency)
        self._duration = self._histogram(
            "request_duration_seconds",
            "From the arrival of a request to its end, however it ended",
            _DURATION_BUCKETS,
        )
        self._queue = self._histogram(
            "queue_time_seconds",
            "From the arrival of a request to its turn in the engine",
            _TTFT_BUCKETS,
        )
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt lengths", _LENGTH_BUCKETS
        )
        self._output_length = self._histogram(
            "request_generation_tokens", "Output lengths", _LENGTH_BUCKETS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._tokens = self._counter("generation_tokens", "Tokens generated")
        self._requests = self._counter(
            "requests",
            "Generations that ended, by endpoint and by how: stop, length, cancelled or error",
            "endpoint",
            "outcome",
        )
        self._errors = self._counter("errors", "Requests that got an error, by its code", "code")
        self._cancelled = self._counter(
            "requests_cancelled", "Requests whose client left or cancelled"
        )
        self._interruptions = self._counter(
            "interruptions", "Times that the engine was lost to a generation"
        )
        self._resumed = self._counter(
            "resumed", "Times that a generation got a token of an engine that had returned"
        )
        self._not_resumed = self._counter(
            "not_resumed", "Generations that ended since they could not go on", "reason"
        )
        self._tenants = TenantMetrics(self.registry)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def text(self) -> bytes:
        """The metrics in Prometheus' text exposition format."""
        return generate_latest(self.registry)

    def register_gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a gauge that calls `value` whenever the metrics are read."""
        Gauge(f"cog_triton_{name}", help_text, registry=self.registry).set_function(value)

    def register_counter(
        self, name: str, help_text: str, value: Callable[[], float], **labels: str
    ) -> None:
        """Add a counter that calls `value` whenever the metrics are read."""
        self.registry.register(_CallbackCounter(f"cog_triton_{name}", help_text, value, labels))

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        self._errors.labels(error.code).inc()
        self._tenants.refused(CURRENT.get(), error.code)

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        outcome = outcome_of(result, error)
        self._requests.labels(request.endpoint, outcome).inc()
        self._duration.observe(result.duration)
        self._prompt_tokens.inc(result.prompt_tokens(request))
        self._prompt_length.observe(result.prompt_tokens(request))
        self._tokens.inc(result.output_token_count)
        self._output_length.observe(result.output_token_count)
        if result.queue_time is not None:
            self._queue.observe(result.queue_time)
        if result.time_to_first_token is not None:
            self._time_to_first_token.observe(result.time_to_first_token)
        self._inter_token_latency.observe_many(inter_token_latencies(result.arrivals))
        if result.interruptions:
            self._interruptions.inc(result.interruptions)
            self._resumed.inc(len(result.resumptions))
        if result.obstacle is not None:
            self._not_resumed.labels(result.obstacle).inc()
        if outcome == "cancelled":
            self._cancelled.inc()
        elif error is not None:
            self._errors.labels(code_of(error)).inc()
        if outcome == "error" and error is not None and result.queue_time is None:
            self._tenants.refused(request.tenant, code_of(error))
        else:
            self._tenants.ended(request, result, outcome)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"cog_triton_{name}", help_text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"cog_triton_{name}", help_text, labels, registry=self.registry)


def outcome_of(result: GenerationResult, error: BaseException | None) -> str:
    """Outcome label: ``stop``, ``length``, ``cancelled`` or ``error``."""
    if result.cancelled:
        return "cancelled"
    return "error" if error is not None else str(result.finish_reason)


def code_of(error: BaseException) -> str:
    """The error code that the client sees."""
    return error.code if isinstance(error, CogTritonError) else TritonUnknownError.code


def inter_token_latencies(arrivals: Iterable[tuple[float, int]]) -> Iterable[tuple[float, int]]:
    """(seconds, count) of inter-token latencies; tokens of one read share the time before it."""
    previous: float | None = None
    for when, count in arrivals:
        if previous is not None:
            yield (when - previous) / count, count
        previous = when


class _CallbackCounter(Collector):
    def __init__(
        self, name: str, help_text: str, value: Callable[[], float], labels: Mapping[str, str]
    ) -> None:
        self._name, self._help, self._value, self._labels = name, help_text, value, labels

    def collect(self) -> Iterable[Metric]:
        yield labelled(CounterMetricFamily, self._name, self._help, self._labels, self._value())
