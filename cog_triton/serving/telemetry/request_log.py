"""Request log: one line a request with outcome, counts and times, never its content."""

from __future__ import annotations

import logging
from typing import Any

from cog_triton.errors import CogTritonError, UserError
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry.metrics import code_of, outcome_of

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
