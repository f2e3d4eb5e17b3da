"""Answers of streaming APIs, timed read by read: events are counted and not parsed."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

PROMPT = "Tell me about the sea."
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(slots=True)
class Stream:
    """One streamed prediction; times are seconds of the monotonic clock.

    `times` has each read that brought output, `counts` how many events were in it. An event of
    output holds OUTPUT once; END begins the last one that is read.
    """

    OUTPUT: ClassVar[bytes] = b"event: output\n"
    END: ClassVar[bytes] = b"event: completed\n"

    sent: float = 0.0
    ended: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))
    told: Mapping[str, Any] = field(default_factory=dict)
    status: int = 0
    _tail: bytes = b""
    _end: bytes | None = None

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `ResponseSink.begin`."""
        self.status = status
        if status >= 300:
            self._end = b""

    def body(self, data: bytes, at: float) -> None:
        """See `ResponseSink.body`; an event counts once its mark is read."""
        if self._end is not None:
            self._end += data
            return
        joined = self._tail + data
        count = joined.count(self.OUTPUT) - self._tail.count(self.OUTPUT)
        if count:
            self.times.append(at)
            self.counts.append(count)
        if self.END in joined:
            self._end = joined.partition(self.END)[2]
        self._tail = joined[1 - max(len(self.OUTPUT), len(self.END)) :]

    def finish(self) -> None:
        """Read the metrics; raises RuntimeError for a prediction that did not succeed."""
        end = (self._end or b"").partition(b"data:")[2].partition(b"\n")[0]
        prediction = json.loads(end) if self.status == 200 and end else {}
        if prediction.get("status") != "succeeded":
            said = prediction.get("error") or self._end
            raise RuntimeError(f"a prediction failed: HTTP {self.status}: {said!r:.500}")
        self.told = prediction.get("metrics") or {}

    @property
    def tokens(self) -> int:
        """Output tokens as the server counts them."""
        return int(self.told["output_token_count"])

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first output."""
        return self.times[0] - self.sent

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of this stream, from sending to the end."""
        return self.tokens / (self.ended - self.sent)

    def gaps(self) -> list[float]:
        """Inter-token latencies in seconds: from read to read, and 0 within one read."""
        between = np.diff(np.frombuffer(self.times)).tolist() if len(self.times) > 1 else []
        return between + [0.0] * max(0, self.tokens - 1 - len(between))


@dataclass(slots=True)
class ChatStream(Stream):
    """One streamed chat completion of an OpenAI API, asked to tell its usage."""

    OUTPUT: ClassVar[bytes] = b'"delta":{"content":"'
    END: ClassVar[bytes] = b'"usage":{'

    def finish(self) -> None:
        """Read the usage; raises RuntimeError for an answer that did not end well."""
        counted = _COMPLETION_TOKENS.search(self._end or b"")
        if self.status != 200 or not counted or b"[DONE]" not in (self._end or b""):
            raise RuntimeError(f"a completion failed: HTTP {self.status}: {self._end!r:.500}")
        self.told = {"output_token_count": int(counted[1])}


@dataclass(frozen=True, slots=True)
class Api:
    """What to send to a path, and how its stream is read; `name` is for tables."""

    name: str
    path: str
    stream: type[Stream]
    body: Callable[[Mapping[str, Any]], Mapping[str, Any]]


def _chat(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inputs of a prediction as a chat completion; `prompt` is the user's one message."""
    rest = dict(inputs)
    messages = [{"role": "user", "content": rest.pop("prompt", PROMPT)}]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": "mock", "messages": messages, "ignore_eos": True, **usage, **rest}


def _prediction(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"input": inputs}


PREDICTIONS = Api("/predictions", "/predictions", Stream, _prediction)
CHAT = Api("/v1", "/v1/chat/completions", ChatStream, _chat)
