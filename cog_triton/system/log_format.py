"""Log lines in the forms of LOG_FORMAT (json, console), with the id of the request they belong to.

A module logs through ``logging.getLogger(__name__)``; each process calls `configure` once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from cog_triton import errors
from cog_triton.errors import CogTritonError
from cog_triton.system.printable import printable

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""The values of LOG_LEVEL."""
STDERR = 2
_LEVEL_NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "ERROR"}  # as Cog's own log has them
_PACKAGE = "cog_triton"

request_id: ContextVar[str] = ContextVar("cog_triton_request_id", default="")
"""Id of the request that this context works for; a thread needs a copy of its starter's context."""


requests = logging.getLogger(__name__)
"""Events of requests: ``request`` at the end of one, ``refused`` for what was not begun."""
# A name, or the path of one, then its value, as our messages begin; words after "the body".
_FIELD = re.compile(
    r"(?:the (?=body))?([A-Za-z_][\w.\[\]-]{0,79})(?:=[^:]*)?(?:: |(?<=body) )(.*)", re.S
)
_QUOTED = re.compile(
    r"""((?:did you mean|must be|should be|of type) )?"""
    r"""("(?:[^"\\]|\\.)*"?|(?<![a-z]{2})'(?:[^'\\]|\\.)*'?|`[^`]*`?)""",
    re.S,
)
_WITHOUT_FIELD = (
    *(errors.PromptTooLong, errors.Unauthorized, errors.RequestTooLarge),
    *(errors.NotFound, errors.RequestTimeout),
)
DESCRIPTOR_VARIABLE = "COG_TRITON_REQUEST_LOG"
"""Where Triton's models log requests: a form, and the `name` of a descriptor; ``off``: nowhere."""
_MOST_OF_AN_ERROR, _MOST_OF_A_VALUE = 2000, 200


def log_request(values: Mapping[str, Any], event: str = "request") -> None:
    """Log the end of a request, with those of `values` that are known."""
    present = {
        key: value[:_MOST_OF_A_VALUE] if isinstance(value, str) else value
        for key, value in values.items()
        if value not in (None, "")
    }
    level = logging.ERROR if present.get("code", "").startswith("E2") else logging.INFO
    requests.log(level, event, extra={"values": present})


def log_refusal(endpoint: str, error: CogTritonError, **values: Any) -> None:
    """Log that a request was not begun: code, the field at fault, and why.

    Of what the client has sent, no value and no quoted text is told. A message that names no field
    may quote all of it; the reason is then told of the classes alone that never do.
    """
    detail = _QUOTED.sub(_without_text, error.detail[:_MOST_OF_AN_ERROR])
    found = _FIELD.match(detail) if isinstance(error, errors.UserError) else None
    field, reason = found.groups() if found else (None, None)
    if isinstance(error, errors.BadPromptTemplate | errors.PromptTemplateError):
        reason = None
    elif found is None and isinstance(error, _WITHOUT_FIELD):
        reason = detail
    told = {"endpoint": endpoint, **values, "code": error.code, "field": field, "reason": reason}
    log_request(told, "refused")


def _without_text(found: re.Match[str]) -> str:
    lead, text = found.groups()
    return found[0] if lead or not re.search(r"\w", text) else f"{text[0]}...{text[0]}"


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to each record; to be used where the record is made, as handlers are."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let all records pass."""
        record.request_id = request_id.get()
        return True


class JSONFormatter(logging.Formatter):
    """One JSON object a line.

    A record with `values` (``extra={"values": {...}}``) is an event: its message is ``event``, and
    the values stand beside it.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        kind = "event" if hasattr(record, "values") else "message"
        line = {
            "timestamp": _time(record),
            "level": _level(record),
            "target": _target(record),
            kind: record.getMessage(),
            **_values(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    """Plain text: time, level, logger, message, and values as ``key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """The text, of more than one line if the message or its traceback has more."""
        return f"{_time(record)} {_level(record):>5} {self.untimed(record)}"

    def untimed(self, record: logging.LogRecord) -> str:
        """The text for a log that adds time and level itself."""
        values = [f"{key}={value}" for key, value in _values(record).items()]
        text = " ".join([f"{_target(record)}: {record.getMessage()}", *values])
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return printable(text, keep="\n\t")


class DescriptorHandler(logging.Handler):
    """Writes each line to a file descriptor at once; a log that is gone ends no request."""

    def __init__(self, descriptor: int, form: str, *, waits: bool = True) -> None:
        """`form` is of LOG_FORMAT. Unless it `waits`, what a full pipe does not take is lost."""
        super().__init__()
        self.descriptor, self.form = descriptor, form
        self.setFormatter(JSONFormatter() if form == "json" else ConsoleFormatter())
        self._poll = None if waits else select.poll()
        if self._poll is not None:
            self._poll.register(descriptor, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 - as every handler of logging does
            self.handleError(record)
            return
        with suppress(OSError):
            if self._poll is None or self._poll.poll(0) == [(self.descriptor, select.POLLOUT)]:
                os.write(self.descriptor, line)


def configure(log_format: str, level: str, descriptor: int = STDERR) -> None:
    """Log to `descriptor`: the package from `level` on, others' libraries from warnings on."""
    install(DescriptorHandler(descriptor, log_format), level)


def configure_from_environment(default_format: str) -> None:
    """Log to stderr as LOG_FORMAT and LOG_LEVEL say; settings.py refuses values that are wrong."""
    configure(os.environ.get("LOG_FORMAT") or default_format, os.environ.get("LOG_LEVEL", ""))


def install(handler: logging.Handler, level: str) -> None:
    """Make `handler` the one of this process, in place of an earlier one."""
    threshold = LEVELS.get(level.lower(), logging.INFO)
    handler.addFilter(RequestIdFilter())
    handler.set_name(_PACKAGE)
    root = logging.getLogger()
    for earlier in [each for each in root.handlers if each.get_name() == _PACKAGE]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))
    logging.getLogger(_PACKAGE).setLevel(threshold)


def own() -> tuple[int, str]:
    """The descriptor of this process's log, and its form."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, DescriptorHandler):
            return handler.descriptor, handler.form
    return STDERR, "json"


def lose_requests_rather_than_wait(descriptor: int, form: str) -> None:
    """Log requests to `descriptor`; lines that a full pipe does not take are lost."""
    handler = DescriptorHandler(descriptor, form, waits=False)
    handler.addFilter(RequestIdFilter())
    requests.addHandler(handler)
    requests.propagate = False


def name(descriptor: int) -> str:
    """An open descriptor for a process that may have inherited it: ``7:14:123``, and its file."""
    file = os.fstat(descriptor)
    return f"{descriptor}:{file.st_dev}:{file.st_ino}"


def inherited(told: str) -> int | None:
    """The descriptor that `name` told; None if it was not passed on, as by mpirun.

    Its number may be another file's here, a connection's to the engine for example.
    """
    descriptor = int(told.partition(":")[0])
    with suppress(OSError):
        return descriptor if name(descriptor) == told else None
    return None


def _time(record: logging.LogRecord) -> str:
    now = datetime.fromtimestamp(record.created, UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _level(record: logging.LogRecord) -> str:
    return _LEVEL_NAMES.get(record.levelno, record.levelname)


def _target(record: logging.LogRecord) -> str:
    return _PACKAGE if hasattr(record, "values") else record.name


def _values(record: logging.LogRecord) -> Mapping[str, Any]:
    found = getattr(record, "request_id", "")
    values: dict[str, Any] = {"id": found} if found else {}
    values |= getattr(record, "values", {})
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, CogTritonError):
        values["error_code"] = error.code
    return values
