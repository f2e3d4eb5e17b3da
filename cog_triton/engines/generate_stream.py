"""Client of Triton's generate_stream that blocks, for a thread of a stub.

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
    TritonUnavailable,
    TritonUnknownError,
)
from cog_triton.text.sse import EventSplitter, event_data

STEP_MODEL = "engine_steps"
ADAPTER_LOADER = "lora_loader"
PRIVATE_MODELS = (STEP_MODEL, ADAPTER_LOADER)
"""Models for our own front end, which the front does not publish."""

_READ_SIZE = 65536
_CONNECT_TIMEOUT_S = 5.0
STOP_INPUTS = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1, "stop": True}
"""Inputs by which the engine's model stops a request, beside the same `streaming`."""


class GenerateStream:
    """One request to `model` of the tritonserver that runs this stub, and its responses.

    That listens at TRITON_HOST and TRITON_HTTP_PORT.
    """

    def __init__(
        self,
        model: str,
        request_id: str,
        values: Mapping[str, Any],
        to_error: Callable[[str], CogTritonError],
        timeout: float | None = None,
    ) -> None:
        """`values` are the inputs, of which Triton takes flat lists. `to_error` maps error texts.

        `timeout` is in seconds between bytes.
        """
        self._host = os.environ.get("TRITON_HOST") or "127.0.0.1"
        self._port = int(os.environ.get("TRITON_HTTP_PORT") or 8000)
        self._path = f"/v2/models/{quote(model, safe='')}/generate_stream"
        self._body = json.dumps({**values, "id": request_id}).encode()
        self._to_error = to_error
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._aborted = False

    def events(self) -> Generator[dict[str, Any], None, None]:
        """Send the request; each response's outputs by name, tensors flattened, as they arrive.

        Raises the engine's error, E2103, E2104, or E2105 if the connection fails or ends early.
        Closing the iterator closes the connection, which stops the engine.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(self._timeout)
            if self._aborted:
                raise TritonUnavailable("hung up before the request was sent")
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", self._path, self._body, headers)
            with connection.getresponse() as response:
                yield from self._parse(response)
        except (OSError, http.client.HTTPException) as error:
            raise TritonUnavailable(
                f"Triton's HTTP at {self._host}:{self._port} (TRITON_HOST, TRITON_HTTP_PORT)"
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
        if not response.getheader("Content-Type", "").startswith("text/event-stream"):
            raise self._refused(response.status, response.read())
        splitter = EventSplitter()
        while chunk := response.read1(_READ_SIZE):
            for event in splitter.feed(chunk):
                if payload := event_data(event):
                    yield self._outputs(payload)
        if splitter.rest.strip():
            raise TritonMalformedEvent(f"the stream ended inside an event: {_shown(splitter.rest)}")
        if response.status != http.client.OK:
            raise self._refused(response.status, b"")

    def _outputs(self, payload: bytes) -> dict[str, Any]:
        try:
            event = json.loads(payload.decode())
        except ValueError as error:
            raise TritonMalformedJSON(f"not JSON: {_shown(payload)}") from error
        if not isinstance(event, dict):
            raise TritonMalformedEvent(f"not an object: {_shown(payload)}")
        if "error" in event:
            raise self._to_error(str(event["error"]))
        return event

    def _refused(self, status: int, body: bytes) -> CogTritonError:
        try:
            return self._to_error(str(json.loads(body)["error"]))
        except (ValueError, KeyError, TypeError):
            return TritonUnknownError(f"Triton answered HTTP {status}: {_shown(body)}")


def _shown(raw: bytes) -> str:
    return repr(raw[:200].decode("utf-8", "replace"))
