"""Token transport of TensorRT-LLM with LoRA adapters: loads one when the engine lacks it.

The engine keeps adapters in a cache, from which it drops those that were used least lately; after a
restart it is empty. A request whose adapter is not in it fails before its first token, and is sent
again after the adapter was loaded.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from cog_triton.engines.generate_stream import ToError, http_error, timed_out
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, StepItem
from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.triton.private_models import ADAPTER_LOADER
from cog_triton.triton.request_streams import RequestStreams
from cog_triton.triton.token_transport import Put, Submission, failure

_NOT_LOADED = re.compile(r"lora_task_id=\d+: not loaded")


class AdapterStreams(RequestStreams):
    """`RequestStreams` whose requests may name an adapter; see `TokenTransport`."""

    def __init__(
        self,
        url: str,
        timeout: float,
        to_error: ToError,
        encode_request: Callable[[EngineRequest], dict[str, Any]],
    ) -> None:
        super().__init__(url, timeout, to_error, encode_request)
        self._loader = f"{url}/v2/models/{ADAPTER_LOADER}/generate"
        self._load_timeout = timeout
        self._error_of = to_error
        self._lock = threading.Lock()
        self._loaded_at: dict[str, float] = {}

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
        return super().submit(request, engine_inputs, put)

    def load(self, name: str, since: float) -> None:
        """Load an adapter, unless that was done after `since`; blocks, raises the coded error."""
        with self._lock:
            if self._loaded_at.get(name, 0.0) > since:
                return
            try:
                answer = httpx.post(
                    self._loader,
                    json={"lora_name": name},
                    timeout=self._load_timeout,
                    trust_env=False,
                )
            except httpx.TimeoutException as error:
                raise timed_out(self._load_timeout) from error
            except httpx.HTTPError as error:
                raise TritonUnavailable(f"{type(error).__name__}; try again") from error
            if answer.status_code != 200:
                raise http_error(answer.status_code, answer.content, self._error_of)
            self._loaded_at[name] = time.monotonic()


class _AdapterRequest:
    """One request, sent again once if its adapter was not loaded."""

    replica = 0

    def __init__(
        self,
        streams: AdapterStreams,
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
