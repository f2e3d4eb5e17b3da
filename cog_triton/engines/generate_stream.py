"""Triton's generate_stream: responses as JSON objects, and a client that blocks, for a thread.

On the standard library: NVIDIA's container has stubs run in a Python of its own, where the wheels
of our other clients are missing.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from cog_triton.errors import (
    CogTritonError,
    TritonMalformedEvent,
    TritonMalformedJSON,
    TritonTimeout,
    TritonUnavailable,
    TritonUnknownError,
    from_text,
)
from cog_triton.text.sse import EventSplitter, event_data

ToError = Callable[[str], CogTritonError]
"""The coded error behind an error text of the engine or of Triton."""

STEP_MODEL = "engine_steps"
ADAPTER_LOADER = "lora_loader"
PRIVATE_MODELS = (STEP_MODEL, ADAPTER_LOADER)
"""Models for our own front end, which the front does not publish."""

_decode = json.JSONDecoder().decode  # json.loads guesses the encoding of bytes first
_READ_SIZE = 65536
_CONNECT_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 5.0
STOP_INPUTS = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1, "stop": True}
"""Inputs by which the engine's model stops a request, beside the same `streaming`."""


def parse_response(payload: bytes, to_error: ToError) -> dict[str, Any]:
    """A response's outputs by name, tensors flattened; raises its coded error, E2103 or E2104."""
    try:
        event = _decode(payload.decode())
    except ValueError as error:
        raise TritonMalformedJSON(f"not JSON: {excerpt(payload)}") from error
    if not isinstance(event, dict):
        raise TritonMalformedEvent(f"not an object: {excerpt(payload)}")
    if "error" in event:
        raise to_error(str(event["error"]))
    return event


def http_error(status: int, body: bytes, to_error: ToError) -> CogTritonError:
    """The coded error behind an answer whose status is not 200."""
    try:
        return to_error(str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError):
        return TritonUnknownError(f"Triton answered HTTP {status}: {excerpt(body)}")


def to_error(text: str) -> CogTritonError:
    """The coded error that `text` begins with; E2100 if it has no code."""
    return from_text(text) or TritonUnknownError(text)


def excerpt(raw: bytes) -> str:
    """The beginning of a response, for an error's text."""
    return repr(raw[:200].decode("utf-8", "replace"))


def timed_out(seconds: float) -> TritonTimeout:
    """E2101 for a request that got nothing for `seconds`."""
    return TritonTimeout(
        f"Triton timed out: nothing arrived for {seconds:g} s (TRITON_TIMEOUT). This can happen for"
        " extremely long prompts or large batches; try a shorter prompt, or send requests more"
        " slowly."
    )


class GenerateEndpoint:
    """The generate_stream endpoint of `model` in the tritonserver that runs this stub.

    That listens at TRITON_HOST and TRITON_HTTP_PORT. `to_error` maps error texts.
    """

    def __init__(self, model: str, to_error: ToError) -> None:
        self.host = os.environ.get("TRITON_HOST") or "127.0.0.1"
        self.port = int(os.environ.get("TRITON_HTTP_PORT") or 8000)
        self.model = model
        self.to_error = to_error

    def request(
        self, values: Mapping[str, Any], request_id: str, timeout: float | None = None
    ) -> GenerateStream:
        """Prepare a request; `values` are the inputs, of which Triton takes flat lists.

        `timeout` is in seconds between bytes.
        """
        body = json.dumps({**values, "id": request_id}).encode()
        return GenerateStream(self, body, timeout)

    def stop(self, request_id: str, *, streaming: bool = True) -> None:
        """Stop a request by its id: while it is queued or in prefill, Triton does not notice a
        closed connection. Without `streaming` for a model that is not decoupled."""
        values = {**STOP_INPUTS, "streaming": streaming}
        for _ in self.request(values, request_id, _STOP_TIMEOUT_S).events():
            pass


class GenerateStream:
    """One request and its responses."""

    def __init__(self, endpoint: GenerateEndpoint, body: bytes, timeout: float | None) -> None:
        self._endpoint = endpoint
        self._body = body
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._aborted = False

    def events(self) -> Generator[dict[str, Any], None, None]:
        """Send the request; each response's outputs by name, tensors flattened, as they arrive.

        Raises the engine's error, E2101, E2103, E2104, or E2105 if the connection fails or ends
        early. Closing the iterator closes the connection, which stops the engine.
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
            raise self._failure(error) from error
        finally:
            connection.close()

    def abort(self) -> None:
        """Close the connection, from any thread; its reader gets E2105."""
        self._aborted = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _parse(self, response: http.client.HTTPResponse) -> Generator[dict[str, Any], None, None]:
        to_error = self._endpoint.to_error
        with response:
            if not response.getheader("Content-Type", "").startswith("text/event-stream"):
                raise http_error(response.status, response.read(), to_error)
            splitter = EventSplitter()
            while chunk := response.read1(_READ_SIZE):
                for event in splitter.feed(chunk):
                    if payload := event_data(event):
                        yield parse_response(payload, to_error)
            if splitter.rest.strip():
                raise TritonMalformedEvent(
                    f"the stream ended inside an event: {excerpt(splitter.rest)}"
                )
            if response.status != http.client.OK:
                raise http_error(response.status, b"", to_error)

    def _failure(self, error: OSError | http.client.HTTPException) -> CogTritonError:
        endpoint = self._endpoint
        if self._socket is not None and self._timeout and isinstance(error, TimeoutError):
            return timed_out(self._timeout)
        return TritonUnavailable(
            f"Triton's HTTP at {endpoint.host}:{endpoint.port} (TRITON_HOST, TRITON_HTTP_PORT)"
            f" failed: {error!r}; try again"
        )
