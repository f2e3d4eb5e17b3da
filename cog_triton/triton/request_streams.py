"""Token transport with a response stream a request: TensorRT-LLM's backend has no other.

An engine keeps LoRA adapters in a cache, from which it drops those that were used least lately;
after a restart it is empty. A request whose adapter is not in it fails before its first token, and
is sent again after the adapter was loaded.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from cog_triton.engines.generate_stream import (
    ADAPTER_LOADER,
    GenerateEndpoint,
    ToError,
    excerpt,
    http_error,
    parse_response,
    timed_out,
)
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, GOES_ON, STOP, StepItem
from cog_triton.errors import CogTritonError, TritonMalformedEvent, TritonUnavailable
from cog_triton.triton.token_transport import Put, Submission, as_list, failure
from cog_triton.triton.triton_connections import Exchange, TritonConnections

_log = logging.getLogger(__name__)

_numbers = itertools.count(1)


class RequestStreams:
    """Sends each request to `generate_stream` of `tensorrt_llm`; see `TokenTransport`.

    Requests may name an adapter, which is loaded when the engine lacks it.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        to_error: ToError,
        encode_request: Callable[[EngineRequest], dict[str, Any]],
    ) -> None:
        """`timeout` is in seconds between tokens of a request."""
        self._timeout = timeout
        self._path = "/v2/models/tensorrt_llm/generate_stream"
        self.to_error = to_error
        self._encode_request = encode_request
        self._loader = GenerateEndpoint.at(url, ADAPTER_LOADER, to_error, timeout)
        self._loading = threading.Lock()
        self._loaded_at: dict[str, float] = {}
        self._running: set[_Stream] = set()
        self._connections = TritonConnections(url, self._check_timeouts)
        self.last_token_at = 0.0

    def open(self) -> None:
        """See `TokenTransport.open`; there is nothing to do."""

    def disconnect(self) -> None:
        """See `TokenTransport.disconnect`; there is nothing to do."""

    def close(self) -> None:
        """See `TokenTransport.close`."""
        self._connections.close()

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> Submission:
        """See `TokenTransport.submit`."""
        if request.adapter is None:
            return self.send(request, engine_inputs, put)
        return _AdapterRequest(self, request, engine_inputs, put)

    def send(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> Submission:
        """Send a request whose adapter, if it has one, is taken to be loaded."""
        request_id = f"{os.getpid()}-{next(_numbers)}"
        values = {**self._encode_request(request), **engine_inputs, "id": request_id}
        streaming = values["streaming"]
        repeats = not (streaming or values.get("exclude_input_in_output"))
        prompt = list(request.input_ids) if repeats else []
        stream = _Stream(
            self,
            request_id,
            put,
            log_probs=request.return_log_probs,
            streaming=streaming,
            prompt=prompt,
        )
        self._running.add(stream)
        try:
            stream.exchange = self._connections.send(
                self._path, json.dumps(values).encode(), stream
            )
        except TritonUnavailable:
            self._running.discard(stream)
            raise
        if stream._ended:  # the reader was faster, and had no connection to close
            stream.exchange.abort()
        return stream

    def load(self, name: str, since: float) -> None:
        """Load an adapter, unless that was done after `since`; blocks, raises the coded error."""
        with self._loading:
            if self._loaded_at.get(name, 0.0) > since:
                return
            for _ in self._loader.request({"lora_name": name}, f"lora-{next(_numbers)}").events():
                pass
            self._loaded_at[name] = time.monotonic()

    def forget(self, stream: _Stream) -> None:
        """Watch a request no longer, since it has ended."""
        self._running.discard(stream)

    def stop(self, request_id: str, *, streaming: bool) -> None:
        """Stop a request by its id, without waiting for the answer."""
        values = {
            "input_ids": [0],
            "input_lengths": 1,
            "request_output_len": 1,
            "streaming": streaming,
            "stop": True,
            "id": request_id,
        }
        self._connections.send(self._path, json.dumps(values).encode(), _LoggedAnswer(request_id))

    def _check_timeouts(self, now: float) -> None:
        for stream in self._running.copy():
            if now - stream.last_at > self._timeout:
                stream.fail(timed_out(self._timeout))


class _Stream:
    """One request: `Receiver` of its responses, and `Submission` of its caller."""

    replica = 0

    def __init__(
        self,
        streams: RequestStreams,
        request_id: str,
        put: Put,
        *,
        log_probs: bool,
        streaming: bool,
        prompt: list[int],
    ) -> None:
        """`prompt` are ids that the answer begins with."""
        self._streams = streams
        self._request_id = request_id
        self._put = put
        self._log_probs = log_probs
        self._streaming = streaming
        self._prompt = prompt
        self._count = 0
        self._ended = False
        self.exchange: Exchange | None = None
        self.last_at = time.monotonic()

    def cancel(self) -> None:
        """See `Submission.cancel`.

        Triton notices a closed connection only when it writes to it, so before the first token, and
        where all come at once, the request is stopped by its id.
        """
        if self._ended:
            return
        self._ended = True
        self._streams.forget(self)
        if self.exchange is not None:
            self.exchange.abort()
        if not self._count:
            try:
                self._streams.stop(self._request_id, streaming=self._streaming)
            except TritonUnavailable as error:
                _log.warning("request %s could not be stopped: %s", self._request_id, error)

    def fail(self, error: CogTritonError) -> None:
        """End the request with an error."""
        if not self._ended:
            self._end(failure(0, error))
            if self.exchange is not None:
                self.exchange.abort()

    def on_payloads(self, payloads: list[bytes]) -> None:
        """See `Receiver.on_payloads`."""
        self.last_at = self._streams.last_token_at = time.monotonic()
        ids: list[int] = []
        log_probs: list[float] = []
        error: CogTritonError | None = None
        try:
            for payload in payloads:
                self._parse(payload, ids, log_probs)
        except CogTritonError as raised:
            error = raised
        if ids and not self._ended:
            offset, width = self._count, int(self._log_probs)
            self._count += len(ids)  # first: who gets the item may cancel at once
            self._put(StepItem(0, 0, offset, ids, log_probs, GOES_ON, None, width))
        if error is not None:
            self.fail(error)

    def on_end(self, status: int, body: bytes) -> None:
        """See `Receiver.on_end`."""
        if self._ended:
            return
        if status != 200:
            self._end(failure(0, http_error(status, body, self._streams.to_error)))
        elif body.strip():
            self._end(
                failure(
                    0, TritonMalformedEvent(f"the stream ended inside an event: {excerpt(body)}")
                )
            )
        else:
            self._end(StepItem(0, 0, self._count, [], [], STOP))

    def on_failure(self, error: TritonUnavailable) -> None:
        """See `Receiver.on_failure`."""
        if not self._ended:
            self._end(failure(0, error))

    def _end(self, item: StepItem) -> None:
        self._ended = True
        self._streams.forget(self)
        self._put(item)

    def _parse(self, payload: bytes, ids: list[int], log_probs: list[float]) -> None:
        event = parse_response(payload, self._streams.to_error)
        if event.get("output_ids") is None:
            raise TritonMalformedEvent(f"no output_ids or error key: {excerpt(payload)}")
        new = as_list(event["output_ids"])
        if any(type(token) is not int for token in new):
            raise TritonMalformedEvent(f"output_ids are not all integers: {excerpt(payload)}")
        if not self._streaming:
            new = self._generated(new, event.get("sequence_length"))
        if self._log_probs:
            values = as_list(event.get("output_log_probs"))
            if len(values) < len(new) or any(type(v) not in (float, int) for v in values):
                raise TritonMalformedEvent(
                    f"no output_log_probs for its tokens: {excerpt(payload)}"
                )
            # The last ones, where an engine repeats earlier ones.
            log_probs += values[len(values) - len(new) :]
        ids += new

    def _generated(self, ids: list[int], length: Any) -> list[int]:
        """The new ids of a whole answer, which may begin with the prompt and end in padding."""
        ids = ids[:length] if type(length) is int else ids
        size = len(self._prompt)
        return ids[size:] if ids[:size] == self._prompt else ids


class _LoggedAnswer:
    """Receiver of an answer that matters only if it is an error."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def on_payloads(self, payloads: list[bytes]) -> None:
        """Log an error."""
        for payload in payloads:
            if b'"error"' in payload:
                self.on_end(0, payload)

    def on_end(self, status: int, body: bytes) -> None:
        """Log an error."""
        if status != 200:
            _log.warning("request %s could not be stopped: %s", self._request_id, excerpt(body))

    def on_failure(self, error: TritonUnavailable) -> None:
        """Log the error."""
        _log.warning("request %s could not be stopped: %s", self._request_id, error)


_NOT_LOADED = re.compile(r"lora_task_id=\d+: not loaded")


class _AdapterRequest:
    """One request, sent again once if its adapter was not loaded."""

    replica = 0

    def __init__(
        self,
        streams: RequestStreams,
        request: EngineRequest,
        engine_inputs: Mapping[str, Any],
        put: Put,
    ) -> None:
        self._streams = streams
        self._request = request
        self._engine_inputs = engine_inputs
        self._put = put
        self._lock = threading.Lock()
        self._cancelled = False
        self._sent_at = time.monotonic()
        self._submission = streams.send(request, engine_inputs, self._first)

    def cancel(self) -> None:
        """See `Submission.cancel`."""
        with self._lock:
            self._cancelled = True
            submission = self._submission
        submission.cancel()

    def _first(self, item: StepItem) -> None:
        """An item of the request as it was sent first."""
        if item.end == ERROR and _NOT_LOADED.search(item.error or ""):
            threading.Thread(target=self._load_and_send, name="adapter", daemon=True).start()
        else:
            self._put(item)

    def _load_and_send(self) -> None:
        try:
            self._streams.load(self._request.adapter or "", self._sent_at)
            with self._lock:
                if self._cancelled:
                    return
                self._submission = self._streams.send(self._request, self._engine_inputs, self._put)
        except CogTritonError as error:
            self._put(failure(0, error))
