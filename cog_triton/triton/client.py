"""Token ids over HTTP: Triton's generate_stream of the ``tensorrt_llm`` model."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import httpx
from typing_extensions import Self

from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.triton.sse import EventBuffer

MODEL = "tensorrt_llm"


class TritonClient:
    """Streams from one Triton server. Closing a stream early stops the engine."""

    def __init__(self, url: str, timeout: float, to_error: Callable[[str], CogTritonError]) -> None:
        """`timeout` is in seconds between bytes; `to_error` maps the engine's error texts."""
        self._timeout = timeout
        self._to_error = to_error
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(timeout, connect=5),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Whether Triton says that all its models are loaded; it says nothing of dead stubs."""
        try:
            response = await self._http.get("/v2/health/ready", timeout=5)
        except httpx.TransportError:
            return False
        return response.status_code == 200

    async def stream(
        self, values: Mapping[str, Any], request_id: str | None = None
    ) -> AsyncGenerator[list[int], None]:
        """New token ids, one list for each network read, until the engine is done.

        Raises the coded error of the engine, or E2101, E2103, E2104, E2105.
        """
        buffer = EventBuffer()
        body = {**values, "id": request_id} if request_id else values
        try:
            async with self._http.stream(
                "POST", f"/v2/models/{MODEL}/generate_stream", json=body
            ) as response:
                if not response.is_success and "event-stream" not in response.headers.get(
                    "content-type", ""
                ):
                    raise self._failure(response.status_code, await response.aread())
                async for chunk in response.aiter_raw():
                    if ids := self._token_ids(buffer.feed(chunk)):
                        yield ids
        except httpx.TimeoutException as error:
            raise TritonTimeout(
                f"Triton timed out after {self._timeout:g}s: httpx.{type(error).__name__}. "
                "This can happen for extremely long prompts or large batches; "
                "try a shorter prompt, or send requests more slowly."
            ) from error
        except httpx.TransportError as error:
            raise TritonUnavailable(
                f"the connection to Triton broke: {type(error).__name__}: {error}; try again"
            ) from error
        if buffer.rest.strip():
            raise TritonMalformedEvent(f"the stream ended inside an event: {_show(buffer.rest)}")

    async def stop(self, request_id: str) -> None:
        """Stop a request that is queued or prefilling, where a closed connection goes unseen."""
        values = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1, "stop": True}
        async for _ in self.stream({**values, "streaming": True}, request_id):
            pass

    def _token_ids(self, payloads: list[bytes]) -> list[int]:
        ids: list[int] = []
        for payload in payloads:
            try:
                event = json.loads(payload)
            except ValueError as error:
                raise TritonMalformedJSON(f"not JSON: {_show(payload)}") from error
            if not isinstance(event, dict):
                raise TritonMalformedEvent(f"not an object: {_show(payload)}")
            if "error" in event:
                raise self._to_error(str(event["error"]))
            if "output_ids" not in event:
                raise TritonMalformedEvent(f"no output_ids or error key: {_show(payload)}")
            tokens = event["output_ids"]
            # Triton writes a tensor of one element as a bare number.
            ids += [tokens] if isinstance(tokens, int) else tokens
        return ids

    def _failure(self, status: int, body: bytes) -> CogTritonError:
        try:
            return self._to_error(str(json.loads(body)["error"]))
        except (ValueError, KeyError, TypeError):
            return TritonUnknownError(f"Triton answered HTTP {status}: {_show(body)}")


def _show(raw: bytes) -> str:
    return repr(raw[:200].decode("utf-8", "replace"))
