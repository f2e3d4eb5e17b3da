"""What all kinds of server have in common: asked, counted, and failing with a code."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from cog_triton import errors
from cog_triton.bench.http_client import Client, Whole, WireError, encode, now, split
from cog_triton.bench.options import Options
from cog_triton.bench.prompt_source import Prompt
from cog_triton.bench.request_record import OK, Record
from cog_triton.text.sse import EventSplitter

Object = dict[str, Any]


class Failure(Exception):
    """A request that was answered, but not with what was asked for."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


def failure(text: str, otherwise: str) -> Failure:
    """The failure an error text tells of: by the code in it, else by `otherwise`."""
    coded = errors.from_text(text)
    return Failure(coded.code if coded else otherwise, text)


class Answer:
    """A sink: counts the pieces of a stream as they come, and keeps what is not one."""

    def __init__(self, record: Record, event: Callable[[bytes], int]) -> None:
        """`event` gets every event of a stream, and tells how many pieces of output it holds."""
        self.status = 0
        self.streamed = False
        self.text = b""
        self.at = 0.0
        self._record = record
        self._event = event
        self._splitter = EventSplitter()

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See `Sink.begin`."""
        self.status = status
        kind = headers.get(b"content-type", b"")
        self.streamed = status < 300 and kind.startswith(b"text/event-stream")

    def body(self, data: bytes, at: float) -> None:
        """See `Sink.body`."""
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
        """Raise what an answer that is no success says."""
        if not 200 <= self.status < 300:
            raise failure(self.text.decode("utf-8", "replace"), f"HTTP {self.status}")


class Target(ABC):
    """One server to measure. `notes` are for the report: what was not sent, or not told."""

    name: ClassVar[str]
    default_port: ClassVar[int]
    start_hint: ClassVar[str]

    def __init__(self, options: Options, client: Client) -> None:
        split(options.url)
        self.options = options
        self.client = client
        self.url = options.url.rstrip("/")
        self.notes: list[str] = []
        self.headers: dict[str, str] = {"User-Agent": "cog-triton-bench", "Accept": "*/*"}

    @abstractmethod
    async def prepare(self) -> None:
        """Find the server and what it takes; raises E1400 if it is not there, E1005 for options.

        Nothing is generated.
        """

    @abstractmethod
    async def send(self, prompt: Prompt, record: Record) -> None:
        """Ask, and fill `record` as the answer comes; raises Failure or WireError."""

    async def measure(self, prompt: Prompt, record: Record) -> None:
        """`send`, with times and what went wrong in `record`; raises nothing but cancellation."""
        record.wanted_tokens = prompt.output_tokens
        record.made_tokens = len(prompt.ids) if prompt.ids and self.options.tokenizer else None
        record.sent = now()
        try:
            await self.send(prompt, record)
            record.status = OK
        except Failure as error:
            record.fail(error.code, str(error))
        except WireError as error:
            record.fail(error.kind, str(error))
        except (ValueError, KeyError, TypeError) as error:
            record.fail("malformed answer", f"{type(error).__name__}: {error}")
        finally:
            if not record.ended:
                record.ended = now()

    def unavailable(self, detail: str) -> errors.TargetUnavailable:
        """E1400, saying what to start."""
        return errors.TargetUnavailable(f"{self.name} at {self.url}: {detail}; {self.start_hint}")

    async def look(self, url: str) -> Whole:
        """GET, raising E1400 where nothing answers."""
        try:
            return await self.client.fetch("GET", url, self.headers)
        except WireError as error:
            raise self.unavailable(f"{error.kind}: {error}") from error

    async def post(
        self, url: str, body: Object, record: Record, event: Callable[[bytes], int], **headers: str
    ) -> Answer:
        """POST `body` as JSON and count what comes back; raises Failure unless it is a success."""
        answer = Answer(record, event)
        head = {**self.headers, **headers}
        await self.client.send(*encode("POST", url, head, json.dumps(body).encode()), answer)
        record.ended = answer.at or now()
        answer.require_ok()
        return answer


def object_of(text: bytes) -> Object:
    """A JSON object; raises Failure."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Failure("malformed answer", f"not a JSON object: {text[:200]!r}")
    return value
