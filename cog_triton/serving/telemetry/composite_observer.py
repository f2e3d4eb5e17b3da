"""Everything that is told of requests, to the one who runs the server."""

from __future__ import annotations

from collections.abc import Sequence

from cog_triton.errors import CogTritonError
from cog_triton.serving.generate import Generation, Observer
from cog_triton.serving.telemetry import tracing
from cog_triton.serving.telemetry.metrics import Metrics
from cog_triton.serving.telemetry.request_log import RequestLog
from cog_triton.settings import Settings


class CompositeObserver:
    """Hands on what happens to metrics, log and traces, as far as they are wanted."""

    def __init__(self, settings: Settings) -> None:
        """Raises E1005 when traces are wanted and cannot be made."""
        self.metrics = Metrics()
        observers: list[Observer] = [self.metrics]
        if settings.log_requests:
            observers.append(RequestLog(settings.log_format))
        if tracing.enabled():
            observers.append(tracing.TracingObserver())
        self._observers: Sequence[Observer] = observers

    def started(self, generation: Generation) -> None:
        """See `Observer.started`."""
        for observer in self._observers:
            observer.started(generation)

    def ended(self, generation: Generation, error: BaseException | None) -> None:
        """See `Observer.ended`."""
        for observer in self._observers:
            observer.ended(generation, error)

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """See `Observer.refused`."""
        for observer in self._observers:
            observer.refused(endpoint, error)
