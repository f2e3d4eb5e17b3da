"""Observers of generations: the request log, and one that forwards to it, metrics and tracing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from cog_triton.errors import CogTritonError, UserError
from cog_triton.serving.generation import GenerationRequest, GenerationResult, Observer
from cog_triton.serving.telemetry import tracing
from cog_triton.serving.telemetry.metrics import Metrics, code_of, outcome_of
from cog_triton.settings.request_defaults import LogSettings

_log = logging.getLogger(__name__)


class RequestLog:
    """Observer that logs an event for each request; see `cog_triton.system.log_format`."""

    def started(self, request: GenerationRequest) -> None:
        """Writes nothing."""

    def ended(
        self, request: GenerationRequest, result: GenerationResult, error: BaseException | None
    ) -> None:
        """See `Observer.ended`."""
        outcome = outcome_of(result, error)
        values: dict[str, Any] = {
            "id": request.id,
            "endpoint": request.endpoint,
            "outcome": outcome,
            "prompt_tokens": result.prompt_tokens(request),
            "output_tokens": result.output_token_count,
            "queue_s": _rounded(result.queue_time),
            "ttft_s": _rounded(result.time_to_first_token),
            "duration_s": _rounded(result.duration),
        }
        if result.interruptions:
            values["interruptions"] = result.interruptions
            values["resumed_after_tokens"] = [tokens for tokens, _ in result.resumptions] or None
            values["resume_wait_s"] = _rounded(sum(waited for _, waited in result.resumptions))
        if outcome == "error" and error is not None:
            values["code"] = code_of(error)
        level = logging.ERROR if values.get("code", "").startswith("E2") else logging.INFO
        _write(level, "request", values)

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """See `Observer.refused`; logs only the code, since the text may quote the request."""
        level = logging.INFO if isinstance(error, UserError) else logging.ERROR
        _write(level, "refused", {"endpoint": endpoint, "code": error.code})


def _write(level: int, event: str, values: dict[str, Any]) -> None:
    present = {key: value for key, value in values.items() if value not in (None, "")}
    _log.log(level, event, extra={"values": present})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


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
