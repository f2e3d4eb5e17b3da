"""Request log: one line a request with outcome, counts and times, never its content."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cog_triton.errors import CogTritonError, UserError
from cog_triton.serving.generate import Generation
from cog_triton.serving.telemetry.metrics import code_of, outcome_of

_STDERR = 2


class RequestLog:
    """Observer that writes JSON lines (LOG_FORMAT=json, as Cog's own log) or text (console)."""

    def __init__(self, log_format: str, descriptor: int | None = None) -> None:
        self._json = log_format == "json"
        self._descriptor = inherited_stderr() if descriptor is None else descriptor

    def started(self, generation: Generation) -> None:
        """Writes nothing."""

    def ended(self, generation: Generation, error: BaseException | None) -> None:
        """See `Observer.ended`."""
        outcome = outcome_of(generation, error)
        values: dict[str, Any] = {
            "id": generation.id,
            "endpoint": generation.endpoint,
            "outcome": outcome,
            "prompt_tokens": len(generation.input_ids),
            "output_tokens": generation.output_token_count,
            "queue_s": _rounded(generation.queue_time),
            "ttft_s": _rounded(generation.time_to_first_token),
            "duration_s": _rounded(generation.duration),
        }
        if outcome == "error" and error is not None:
            values["code"] = code_of(error)
        level = "ERROR" if values.get("code", "").startswith("E2") else "INFO"
        self._write(level, "request", values)

    def refused(self, endpoint: str, error: CogTritonError) -> None:
        """See `Observer.refused`; logs only the code, since the text may quote the request."""
        level = "INFO" if isinstance(error, UserError) else "ERROR"
        self._write(level, "refused", {"endpoint": endpoint, "code": error.code})

    def _write(self, level: str, event: str, values: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        told = {key: value for key, value in values.items() if value not in (None, "")}
        if self._json:
            line = json.dumps(
                {"timestamp": now, "level": level, "target": "cog_triton", "event": event, **told}
            )
        else:
            words = " ".join(f"{key}={value}" for key, value in told.items())
            line = f"{now} {level:>5} cog_triton: {event} {words}"
        with suppress(OSError):  # a log that is gone must not end a request
            os.write(self._descriptor, f"{line}\n".encode())


def inherited_stderr() -> int:
    """File descriptor of the stderr that Cog's server was started with.

    coglet 0.23.1 replaces the worker's stderr by a pipe, and wraps every line that it reads there;
    but it keeps the inherited one open under another number, which is recognized by being the
    same file as our parent's stderr.
    """
    with suppress(OSError):
        wanted = Path(f"/proc/{os.getppid()}/fd/{_STDERR}").stat()
        for name in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
            descriptor = int(name.name)
            with suppress(OSError):
                if descriptor > _STDERR and os.path.samestat(os.fstat(descriptor), wanted):
                    return descriptor
    return _STDERR


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
