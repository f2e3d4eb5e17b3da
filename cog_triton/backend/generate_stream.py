"""HTTP client of Triton's generate_stream for its own stubs, on the standard library.

NVIDIA's container has stubs run in a Python of its own, where the wheels of our client are missing.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.text.sse import EventSplitter, event_data

_READ_SIZE = 65536
_CONNECT_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 5.0
_STOP = {
    "input_ids": [0],
    "input_lengths": 1,
    "request_output_len": 1,
    "streaming": True,
    "stop": True,
}


@dataclass(frozen=True, slots=True)
class GenerateEndpoint:
    """The generate_stream endpoint of `model`; `to_error` maps error texts."""

    host: str
    port: int
    model: str
    to_error: Callable[[str], CogTritonError]

    @classmethod
    def of_this_server(
        cls, model: str, to_error: Callable[[str], CogTritonError]
    ) -> GenerateEndpoint:
        """Where the tritonserver that runs this stub listens: TRITON_HOST and TRITON_HTTP_PORT."""
        host = os.environ.get("TRITON_HOST") or "127.0.0.1"
        return cls(host, int(os.environ.get("TRITON_HTTP_PORT") or 8000), model, to_error)

    def request(self, values: Mapping[str, Any], request_id: str) -> GenerateStream:
        """Prepare a request; `values` are the inputs, of which Triton takes flat lists."""
        return GenerateStream(self, values, request_id)

    def stop(self, request_id: str, *, streaming: bool = True) -> None:
        """Stop a request by its id: while it is queued or in prefill, Triton does not notice a
        closed connection. Without `streaming` for a model that is not decoupled."""
        values = {**_STOP, "streaming": streaming}
        for _ in GenerateStream(self, values, request_id, _STOP_TIMEOUT_S).events():
            pass


class GenerateStream:
    """One request and its responses; without a timeout unless one is given."""

    def __init__(
        self,
        endpoint: GenerateEndpoint,
        values: Mapping[str, Any],
        request_id: str,
        timeout: float | None = None,
    ) -> None:
        """`timeout` is in seconds between bytes."""
        self._endpoint = endpoint
        self._body = json.dumps({**values, "id": request_id}).encode()
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._aborted = False

    def events(self) -> Generator[dict[str, Any], None, None]:
        """Send the request; each response's outputs by name, tensors flattened, as they arrive.

        Raises the engine's error, E2105 if the connection fails or ends early. Closing the
        iterator closes the connection.
        """
        endpoint = self._endpoint
        connection = http.client.HTTPConnection(
            endpoint.host, endpoint.port, timeout=_CONNECT_TIMEOUT_S
        )
        try:
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(self._timeout)
            if self._aborted:
                raise TritonUnavailable("hung up before the request was sent")
            connection.request(
                "POST",
                f"/v2/models/{quote(endpoint.model, safe='')}/generate_stream",
                self._body,
                {"Content-Type": "application/json", "Connection": "close"},
            )
            yield from self._parse(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise TritonUnavailable(
                f"Triton's HTTP at {endpoint.host}:{endpoint.port} (TRITON_HOST, TRITON_HTTP_PORT)"
                f" failed: {error!r}; try again"
            ) from error
        finally:
            connection.close()

    def abort(self) -> None:
        """Close the connection, from any thread; its reader gets E2105."""
        self._aborted = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _parse(self, response: http.client.HTTPResponse) -> Generator[dict[str, Any], None, None]:
        with response:
            if not response.getheader("Content-Type", "").startswith("text/event-stream"):
                raise self._refusal(response.status, response.read())
            splitter = EventSplitter()
            while chunk := response.read1(_READ_SIZE):
                for event in splitter.feed(chunk):
                    if payload := event_data(event):
                        yield self._outputs(payload)
            if splitter.rest.strip():
                raise TritonMalformedEvent(
                    f"the stream ended inside an event: {_excerpt(splitter.rest)}"
                )
            if response.status != http.client.OK:
                raise self._refusal(response.status, b"")

    def _outputs(self, payload: bytes) -> dict[str, Any]:
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise TritonMalformedJSON(f"not JSON: {_excerpt(payload)}") from error
        if not isinstance(event, dict):
            raise TritonMalformedEvent(f"not an object: {_excerpt(payload)}")
        if "error" in event:
            raise self._endpoint.to_error(str(event["error"]))
        return event

    def _refusal(self, status: int, body: bytes) -> CogTritonError:
        try:
            return self._endpoint.to_error(str(json.loads(body)["error"]))
        except (ValueError, KeyError, TypeError):
            return TritonUnknownError(f"Triton answered HTTP {status}: {_excerpt(body)}")


def _excerpt(raw: bytes) -> str:
    return repr(raw[:200].decode("utf-8", "replace"))
