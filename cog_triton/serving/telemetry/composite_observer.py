"""Composite observer: forwards generation events to metrics, request log and tracing."""

from __future__ import annotations

from collections.abc import Sequence

from cog_triton.errors import CogTritonError
from cog_triton.serving.generation import GenerationRequest, GenerationResult, Observer
from cog_triton.serving.telemetry import tracing
from cog_triton.serving.telemetry.metrics import Metrics
from cog_triton.serving.telemetry.request_log import RequestLog
from cog_triton.settings.request_defaults import LogSettings


class CompositeObserver:
    """Forwards every event to the observers that are enabled by settings."""

    def __init__(self, settings: LogSettings) -> None:
        """Raises E1005 when tracing is enabled and its packages are not installed."""
        self.metrics = Metrics()
        observers: list[Observer] = [self.metrics]
        if settings.log_requests:
            observers.append(RequestLog())
        if tracing.enabled():
            observers.append(tracing.TracingObserver())
        self._observers: Sequence[Observer] = observers

    def started(self, request: GenerationRequest) -> None:
        """See `Observer.started`."""
        for observer in self._observers:
            observer.started(request)

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        """See `Observer.ended`."""
        for observer in self._observers:
            observer.ended(request, result, error)

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """See `Observer.refused`."""
        for observer in self._observers:
            observer.refused(endpoint, error)
