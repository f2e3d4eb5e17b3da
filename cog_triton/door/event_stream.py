"""Ends of event streams: errors that begin with a code, whatever the server behind says first."""

from __future__ import annotations

import json
import re

from cog_triton.errors import TritonUnavailable

# What coglet says of predictions whose worker has died; keys are sorted, so it comes first.
_WORKER_DIED = ("Worker crashed", "Failed to send request")
_COMPLETED = b'\r\nevent: completed\ndata: {"error":"'
_UNCODED = re.compile(
    rb'([0-9A-Fa-f]{1,8})(\r\nevent: completed\ndata: \{"error":)"((?:%s)[^"\\]{0,150})"'
    % "|".join(_WORKER_DIED).encode()
)
# What coglet puts before the text of a prediction's exception: its own words, and the class.
_WORDS = (
    rb"Prediction failed: (?:[A-Z][a-z]{1,20}(?: [a-z]{1,20}){1,3}: )?"
    rb"(?:\w{1,64}: )?(?=E[12]\d{3} )"
)
_LATE_CODE = re.compile(
    rb'([0-9A-Fa-f]{1,8})(\r\nevent: completed\ndata: \{"error":")(%b)' % _WORDS
)
_ERROR_FIRST = re.compile(rb'\A(\{"error":")%b' % _WORDS)
_EVENT_END = b"\n\n\r\n"
_WHOLE = (_EVENT_END, b"0\r\n\r\n")
_MOST_HELD = 256


def worker_death(reason: str) -> TritonUnavailable | None:
    """E2105 for one of coglet's own failures, None for any other."""
    if not reason.startswith(_WORKER_DIED):
        return None
    return TritonUnavailable(f"Cog's worker has died: {reason}; try again")


def code_first(body: bytes) -> bytes | None:
    """A failed prediction whose error begins with its code; None if coglet's does, or has none."""
    changed, count = _ERROR_FIRST.subn(rb"\1", body, count=1)
    return changed if count else None


def ends_between_events(tail: bytes) -> bool:
    """Whether another event can follow bytes of a chunked stream with this end."""
    return not tail or tail.endswith(_EVENT_END)


def last_event(event: bytes) -> bytes:
    """One event as a chunk of a response, and the response's end."""
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)


class CodedEnd:
    """Gives coglet's last event its code at its beginning; a chunk an event, as coglet writes them.

    Only the start of an event is ever held back, for as long as the rest of it has not come.
    """

    def __init__(self) -> None:
        self._held = b""

    def __call__(self, data: bytes) -> bytes:
        """What of the stream can be passed on, now that `data` has come."""
        if self._held:
            data, self._held = self._held + data, b""
        if _COMPLETED in data:
            data = _UNCODED.sub(_coded, data, count=1)
            data = _LATE_CODE.sub(_without_words, data, count=1)
        if data.endswith(_WHOLE):
            return data
        start = data.rfind(_EVENT_END)
        start = start + len(_EVENT_END) if start >= 0 else 0
        if len(data) - start < _MOST_HELD:
            data, self._held = data[:start], data[start:]
        return data


def _coded(found: re.Match[bytes]) -> bytes:
    size, between, reason = found.groups()
    error = json.dumps(str(worker_death(reason.decode("utf-8", "replace")))).encode()
    return b"%x%b%b" % (int(size, 16) - len(reason) - 2 + len(error), between, error)


def _without_words(found: re.Match[bytes]) -> bytes:
    size, between, words = found.groups()
    return b"%x%b" % (int(size, 16) - len(words), between)
