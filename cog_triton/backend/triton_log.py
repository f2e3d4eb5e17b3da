"""Log records of Triton's Python models, forwarded to Triton's own log."""

from __future__ import annotations

import logging
import os
from typing import Any

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
        """See `logging.Handler.emit`."""
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
