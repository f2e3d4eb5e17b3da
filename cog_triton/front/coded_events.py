"""Codes at the beginning of errors in coglet's streams and answers, whatever it says first."""

from __future__ import annotations

import json
import re

from cog_triton.errors import TritonUnavailable

# What coglet says of predictions whose worker has died; keys are sorted, so it comes first.
_WORKER_DIED = ("Worker crashed", "Failed to send request")
# What coglet puts before the text of a prediction's exception: its own words, and the class.
WORDS = (
    rb"Prediction failed: (?:[A-Z][a-z]{1,20}(?: [a-z]{1,20}){1,3}: )?"
    rb"(?:\w{1,64}: )?(?=E[12]\d{3} )"
)
_COMPLETED = b'event: completed\ndata: {"error":"'
_UNCODED = re.compile(
    b'(%b)(?:(?P<death>(?:%b)[^"\\\\]{0,150})(?=")|%b)'
    % (re.escape(_COMPLETED), "|".join(_WORKER_DIED).encode(), WORDS)
)
_EVENT_END = b"\n\n"
_MOST_HELD = 256


def worker_death(reason: str) -> TritonUnavailable | None:
    """E2105 for one of coglet's own failures, None for any other."""
    if not reason.startswith(_WORKER_DIED):
        return None
    return TritonUnavailable(f"Cog's worker has died: {reason}; try again")


class CodedEnd:
    """Gives coglet's last event its code at its beginning.

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
        if data.endswith(_EVENT_END):
            return data
        start = data.rfind(_EVENT_END) + len(_EVENT_END) if _EVENT_END in data else 0
        if len(data) - start >= _MOST_HELD:  # all but a first half of its end
            start = len(data) - data.endswith(b"\n")
        self._held = data[start:]
        return data[:start]

    def end(self) -> bytes:
        """What is still held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held


def _coded(found: re.Match[bytes]) -> bytes:
    if (reason := found["death"]) is None:
        return found[1]
    text = json.dumps(str(worker_death(reason.decode("utf-8", "replace"))))
    return found[1] + text[1:-1].encode()
