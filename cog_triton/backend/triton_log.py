"""Log records of Triton's Python models: to Triton's own log, those of requests to the server's."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from cog_triton.errors import CogTritonError, UserError
from cog_triton.system import log_format


class TritonLogHandler(logging.Handler):
    """Hands records to ``pb_utils.Logger``, which adds time and level.

    Debug records are info there: Triton drops its verbose lines unless it was started with
    --log-verbose, and LOG_LEVEL has chosen already.
    """

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger
        self._formatter = log_format.ConsoleFormatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self._formatter.untimed(record)
            if record.levelno >= logging.ERROR:
                self._logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                self._logger.log_warn(text)
            else:
                self._logger.log_info(text)
        except Exception:  # noqa: BLE001 - as every handler of logging does
            self.handleError(record)


def install() -> None:
    """Log to Triton's log; to stderr, which ends up there, in a process that is no Triton stub."""
    try:
        import triton_python_backend_utils as pb_utils
    except ImportError:
        log_format.configure("console", os.environ.get("LOG_LEVEL", ""))
        return
    log_format.install(TritonLogHandler(pb_utils.Logger), os.environ.get("LOG_LEVEL", ""))
    form, _, told = os.environ.get(log_format.DESCRIPTOR_VARIABLE, "").partition(":")
    log_format.requests.disabled = form == "off"
    if told and (descriptor := log_format.inherited(told)) is not None:
        log_format.lose_requests_rather_than_wait(descriptor, form)


class RequestLine:
    """Line in the server's log of a request that came by Triton's own API, HTTP or gRPC."""

    def __init__(self, model: str, request_id: str) -> None:
        self._began = time.perf_counter()
        self._named = {"endpoint": "triton", "id": request_id, "model": model}
        self._first: float | None = None
        self.prompt_tokens = self.output_tokens = 0

    def arrived(self, tokens: int) -> None:
        """Count output tokens; the first time counts for TTFT."""
        self._first = self._first or time.perf_counter() - self._began
        self.output_tokens += tokens

    def ended(self, outcome: str | CogTritonError | None) -> None:
        """Log it, with its finish reason or error."""
        error = outcome if isinstance(outcome, CogTritonError) else None
        if isinstance(error, UserError) and not self.output_tokens:
            log_format.log_refusal(error=error, **self._named)
            return
        values = {
            "outcome": "error" if error is not None else outcome,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": 0.0,
            "ttft_s": self._first and round(self._first, 4),
            "duration_s": round(time.perf_counter() - self._began, 4),
            "code": error and error.code,
        }
        log_format.log_request({**self._named, **values})
