"""Triton client: token ids over HTTP from generate_stream of the ``tensorrt_llm`` model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from typing_extensions import Self

from cog_triton.engines.tensor_contract import FINISH_REASON
from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.text.sse import EventSplitter, event_data
from cog_triton.triton.http_stream import HTTPStream, StreamBroken, StreamTimeout

_MODEL = "tensorrt_llm"
_STOP_TIMEOUT_S = 5.0
_decode = json.JSONDecoder().decode  # json.loads guesses the encoding of bytes first
T = TypeVar("T")


class TritonClient:
    """Client of one Triton server; thread-safe."""

    def __init__(
        self,
        url: str,
        timeout: float,
        to_error: Callable[[str], CogTritonError],
        reports_finish_reason: bool = False,
    ) -> None:
        """`timeout` is in seconds between bytes; `to_error` maps the engine's error texts.

        With `reports_finish_reason` (see `EngineFamily`), a stream that lacks its last response
        is E2105.
        """
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._timeout = timeout
        self._to_error = to_error
        self._reports_finish_reason = reports_finish_reason
        self._http = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)
        self.last_byte_at = 0.0
        """When any stream last received a byte, by time.monotonic()."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Readiness probe: whether Triton reports all models as loaded; dead stubs go unnoticed.

        Has no timeout; call it from one event loop only.
        """
        try:
            response = await self._http.get("/v2/health/ready")
        except httpx.TransportError:
            return False
        return response.status_code == 200

    def request(
        self, values: Mapping[str, Any], request_id: str | None = None, model: str = _MODEL
    ) -> HTTPStream:
        """Prepare a request for `tokens` or `events`; its `abort` stops the engine."""
        return self._request(values, request_id, self._timeout, model)

    def tokens(
        self, request: HTTPStream, log_probs: list[float] | None = None
    ) -> Generator[list[int], None, None]:
        """New token ids, one list for each network read, until the engine is done.

        `log_probs` gets one value for each of them, if they were asked for. Raises the coded
        error of the engine, or E2101, E2103, E2104, E2105. Blocks; closing the iterator stops
        the engine.

        A `request` that pauses yields an empty list where it does.

        A starved HTTP thread of Triton (24.10) loses the last responses of a stream, and then ends
        it normally, or never; see `http_thread_queues`.
        """
        finished: list[str] = []
        with closing(
            self._parsed_events(
                request, lambda payload: self._token_ids(payload, log_probs, finished)
            )
        ) as answers:
            for ids in answers:
                yield ids
                if finished:
                    return
        if self._reports_finish_reason and not finished:
            raise TritonUnavailable(
                "Triton was too busy and lost the end of the answer; try again (HTTP queues in"
                " `cog-triton doctor` tells how to prevent it)"
            )

    def events(self, request: HTTPStream) -> Generator[list[dict[str, Any]], None, None]:
        """Like `tokens`, but whole events: a response's outputs by name, tensors flattened."""
        return self._parsed_events(request, lambda payload: [self._event(payload)])

    def _parsed_events(
        self, request: HTTPStream, parse: Callable[[bytes], list[T]]
    ) -> Generator[list[T], None, None]:
        splitter = EventSplitter()
        try:
            with request as response:
                for _ in response.head():
                    yield []
                is_text = response.status != 200 and not response.is_event_stream
                text = b""
                for chunk in response.chunks():
                    if not chunk:
                        yield []
                        continue
                    if is_text:
                        text += chunk
                        continue
                    self.last_byte_at = time.monotonic()
                    found, error = self._parse_payloads(splitter.feed(chunk), parse)
                    if found:
                        yield found
                    if error is not None:
                        raise error
                if response.status != 200:
                    raise self._http_error(response.status, text or splitter.rest)
        except StreamTimeout as error:
            raise TritonTimeout(
                f"Triton timed out: {error} (TRITON_TIMEOUT). This can happen for extremely long"
                " prompts or large batches; try a shorter prompt, or send requests more slowly."
            ) from error
        except StreamBroken as error:
            raise TritonUnavailable(f"{error}; try again") from error
        if splitter.rest.strip():
            raise TritonMalformedEvent(
                f"the stream ended inside an event: {_excerpt(splitter.rest)}"
            )

    def stop(self, request_id: str, model: str = _MODEL) -> None:
        """Stop a request by its id: while it is queued or in prefill, Triton does not notice a
        closed connection."""
        values = {
            "input_ids": [0],
            "input_lengths": 1,
            "request_output_len": 1,
            "streaming": True,
            "stop": True,
        }
        request = self._request(values, request_id, _STOP_TIMEOUT_S, model)
        for _ in self._parsed_events(request, lambda payload: [self._event(payload)]):
            pass

    def _request(
        self, values: Mapping[str, Any], request_id: str | None, timeout: float, model: str
    ) -> HTTPStream:
        body = json.dumps({**values, "id": request_id} if request_id else values).encode()
        path = f"/v2/models/{quote(model, safe='')}/generate_stream"
        return HTTPStream(self._host, self._port, path, body, timeout)

    def _parse_payloads(
        self, events: list[bytes], parse: Callable[[bytes], list[T]]
    ) -> tuple[list[T], CogTritonError | None]:
        """Parsed values up to the first event that is an error, and that error."""
        found: list[T] = []
        try:
            for event in events:
                if payload := event_data(event):
                    found += parse(payload)
        except CogTritonError as error:
            return found, error
        return found, None

    def _event(self, payload: bytes) -> dict[str, Any]:
        try:
            event = _decode(payload.decode())
        except ValueError as error:
            raise TritonMalformedJSON(f"not JSON: {_excerpt(payload)}") from error
        if not isinstance(event, dict):
            raise TritonMalformedEvent(f"not an object: {_excerpt(payload)}")
        if "error" in event:
            raise self._to_error(str(event["error"]))
        return event

    def _token_ids(
        self, payload: bytes, log_probs: list[float] | None, finished: list[str]
    ) -> list[int]:
        event = self._event(payload)
        if FINISH_REASON in event:
            finished.append(event[FINISH_REASON])
        if "output_ids" not in event:
            raise TritonMalformedEvent(f"no output_ids or error key: {_excerpt(payload)}")
        tokens = event["output_ids"]
        # Triton writes a tensor of one element as a bare number.
        ids: list[int] = tokens if isinstance(tokens, list) else [tokens]
        if any(type(token) is not int for token in ids):
            raise TritonMalformedEvent(f"output_ids are not all integers: {_excerpt(payload)}")
        if log_probs is not None:
            log_probs += _log_probs(event, len(ids), payload)
        return ids

    def _http_error(self, status: int, body: bytes) -> CogTritonError:
        try:
            return self._to_error(str(json.loads(body)["error"]))
        except (ValueError, KeyError, TypeError):
            return TritonUnknownError(f"Triton answered HTTP {status}: {_excerpt(body)}")


def _log_probs(event: Mapping[str, Any], count: int, payload: bytes) -> list[float]:
    """Log probabilities of the event's `count` tokens: the last ones, where an engine repeats
    earlier ones."""
    values = event.get("output_log_probs")
    found: list[Any] = values if isinstance(values, list) else [values]
    if len(found) < count or any(type(value) not in (float, int) for value in found):
        raise TritonMalformedEvent(f"no output_log_probs for its tokens: {_excerpt(payload)}")
    return found[len(found) - count :]


def _excerpt(raw: bytes) -> str:
    return repr(raw[:200].decode("utf-8", "replace"))
