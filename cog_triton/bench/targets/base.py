"""Interface of benchmark targets: send a request, count its output, classify its failure."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from cog_triton import errors
from cog_triton.bench.http_client import (
    BufferedResponse,
    Client,
    TransportError,
    encode_request,
    now,
    split_url,
)
from cog_triton.bench.options import Options
from cog_triton.bench.prompt_source import Prompt
from cog_triton.bench.request_record import OK, Record
from cog_triton.text.sse import EventSplitter

JSONObject = dict[str, Any]


class Failure(Exception):
    """Failed request with an answer; `code` is its failure class."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


def failure(text: str, otherwise: str) -> Failure:
    """Failure of an error text: its code, if the text has one, else `otherwise`."""
    coded = errors.from_text(text)
    return Failure(coded.code if coded else otherwise, text)


class CountingSink:
    """Response sink: counts the pieces of an event stream, and buffers any other body."""

    def __init__(self, record: Record, event: Callable[[bytes], int]) -> None:
        """`event` gets every event of a stream, and returns its number of pieces of output."""
        self.status = 0
        self.streamed = False
        self.text = b""
        self.at = 0.0
        self._record = record
        self._event = event
        self._splitter = EventSplitter()

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `ResponseSink.begin`."""
        self.status = status
        kind = headers.get(b"content-type", b"")
        self.streamed = status < 300 and kind.startswith(b"text/event-stream")

    def body(self, data: bytes, at: float) -> None:
        """See `ResponseSink.body`."""
        self.at = at
        if not self.streamed:
            self.text += data
            return
        pieces = 0
        for event in self._splitter.feed(data):
            pieces += self._event(event)
        if pieces:
            self._record.output(at, pieces)

    def require_ok(self) -> None:
        """Raise `Failure` unless the status is a success."""
        if not 200 <= self.status < 300:
            raise failure(self.text.decode("utf-8", "replace"), f"HTTP {self.status}")


class Target(ABC):
    """One server to measure; `notes` go to the report."""

    name: ClassVar[str]
    default_port: ClassVar[int]
    start_hint: ClassVar[str]

    def __init__(self, options: Options, client: Client) -> None:
        split_url(options.url)
        self.options = options
        self.client = client
        self.url = options.url.rstrip("/")
        self.notes: list[str] = []
        self.headers: dict[str, str] = {"User-Agent": "cog-triton-bench", "Accept": "*/*"}

    @abstractmethod
    async def prepare(self) -> None:
        """Find the server and the inputs it accepts; raises E1400 if absent, E1005 for options.

        Nothing is generated.
        """

    @abstractmethod
    async def send(self, prompt: Prompt, record: Record) -> None:
        """Send a request and fill `record` with its answer; raises Failure or TransportError."""

    async def measure(self, prompt: Prompt, record: Record) -> None:
        """Send a request, with times and any failure in `record`; raises only cancellation."""
        record.wanted_tokens = prompt.output_tokens
        record.sent = now()
        try:
            await self.send(prompt, record)
            record.status = OK
        except Failure as error:
            record.fail(error.code, str(error))
        except TransportError as error:
            record.fail(error.kind, str(error))
        except (ValueError, KeyError, TypeError) as error:
            record.fail("malformed answer", f"{type(error).__name__}: {error}")
        finally:
            if not record.ended:
                record.ended = now()

    def unavailable(self, detail: str) -> errors.TargetUnavailable:
        """E1400, with a hint what to start."""
        return errors.TargetUnavailable(f"{self.name} at {self.url}: {detail}; {self.start_hint}")

    async def get(self, url: str) -> BufferedResponse:
        """GET `url`; raises E1400 if nothing answers."""
        try:
            return await self.client.fetch("GET", url, self.headers)
        except TransportError as error:
            raise self.unavailable(f"{error.kind}: {error}") from error

    async def post(
        self,
        url: str,
        body: JSONObject,
        record: Record,
        event: Callable[[bytes], int],
        **headers: str,
    ) -> CountingSink:
        """POST `body` as JSON and count the answer's pieces; raises Failure unless it succeeds."""
        answer = CountingSink(record, event)
        head = {**self.headers, **headers}
        await self.client.send(
            *encode_request("POST", url, head, json.dumps(body).encode()), answer
        )
        record.ended = answer.at or now()
        answer.require_ok()
        return answer


def parse_object(text: bytes) -> JSONObject:
    """Parse a JSON object; raises Failure."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Failure("malformed answer", f"not a JSON object: {text[:200]!r}")
    return value
