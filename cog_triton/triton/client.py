"""Triton client for a thread a request: responses over HTTP from generate_stream of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from cog_triton.errors import CogTritonError, TritonMalformedEvent, TritonUnavailable
from cog_triton.triton.http_exchange import ExchangeBroken
from cog_triton.triton.http_stream import HTTPStream, StreamTimeout
from cog_triton.triton.response_events import excerpt, http_error, parse_response
from cog_triton.triton.token_transport import timed_out

_MODEL = "tensorrt_llm"
_STOP_TIMEOUT_S = 5.0


class TritonClient:
    """Client of one Triton server; thread-safe."""

    def __init__(
        self,
        url: str,
        timeout: float,
        to_error: Callable[[str], CogTritonError],
    ) -> None:
        """`timeout` is in seconds between bytes; `to_error` maps the engine's error texts."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._timeout = timeout
        self._to_error = to_error
        self._http = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)

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
        """Prepare a request for `events`; its `abort` stops the engine."""
        return self._request(values, request_id, self._timeout, model)

    def events(self, request: HTTPStream) -> Generator[list[dict[str, Any]], None, None]:
        """Responses, one list for each network read: outputs by name, tensors flattened.

        Raises the coded error of the engine, or E2101, E2103, E2104, E2105. Blocks; closing the
        iterator, or `abort` of the request, stops the engine.
        """
        try:
            with request as response:
                for payloads in response.payloads():
                    found, error = self._parse(payloads)
                    if found:
                        yield found
                    if error is not None:
                        raise error
                status, body = response.status, response.body
        except StreamTimeout as error:
            raise timed_out(request.timeout) from error
        except ExchangeBroken as error:
            raise TritonUnavailable(f"{error}; try again") from error
        if status != 200:
            raise http_error(status, body, self._to_error)
        if body.strip():
            raise TritonMalformedEvent(f"the stream ended inside an event: {excerpt(body)}")

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
        for _ in self.events(request):
            pass

    def _request(
        self, values: Mapping[str, Any], request_id: str | None, timeout: float, model: str
    ) -> HTTPStream:
        body = json.dumps({**values, "id": request_id} if request_id else values).encode()
        path = f"/v2/models/{quote(model, safe='')}/generate_stream"
        return HTTPStream(self._host, self._port, path, body, timeout)

    def _parse(self, payloads: list[bytes]) -> tuple[list[dict[str, Any]], CogTritonError | None]:
        """Responses up to the first that is an error, and that error."""
        found: list[dict[str, Any]] = []
        try:
            for payload in payloads:
                found.append(parse_response(payload, self._to_error))
        except CogTritonError as error:
            return found, error
        return found, None
