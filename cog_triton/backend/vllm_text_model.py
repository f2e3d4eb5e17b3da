"""Triton model ``vllm_model``: the text contract of Triton's vllm_backend.

The engine is the one that ``tensorrt_llm`` runs; this model is a second peer of its host. One
thread brings the engine's events and sends responses, one more looks for clients that have gone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend
from cog_triton.backend.vllm_host_link import HostLink
from cog_triton.backend.vllm_metrics import MetricsPublisher, publisher
from cog_triton.backend.vllm_tensors import ParsedRequest, parse, tensors
from cog_triton.errors import CogTritonError

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_YES = ("yes", "true")


class TritonPythonModel:
    """Decoupled: `execute` only hands requests on, so they do not wait for each other."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Begin to look for the engine; raises E1202, which ends tritonserver."""
        parameters = python_backend.Parameters(args)
        self._name = args["model_name"]
        self._check_period = parameters.whole("cancellation_check_period_ms") / 1000
        self._link = HostLink(parameters.text("socket"))
        self._handles = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._metrics: MetricsPublisher | None = None
        if parameters.choice("REPORT_CUSTOM_METRICS", (*_YES, "no", "false")) in _YES:
            labels = {"model": args["model_name"], "version": args["model_version"]}
            self._metrics = publisher(labels, parameters.whole("max_model_len"), self._fetch)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine; its events send the responses."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                parsed = parse(
                    self._name,
                    python_backend.input_tensors(request),
                    python_backend.request_values(request),
                )
                call = _Call(next(self._handles), parsed, sender, self._calls)
                self._calls[call.handle] = call
                self._link.submit(call.handle, parsed.request, call.emit)
            except CogTritonError as error:
                sender.send(python_backend.failure(error), flags=_FINAL)

    def finalize(self) -> None:
        """Stop all threads; Triton has ended all requests before."""
        self._closing.set()
        self._watcher.join()
        if self._metrics is not None:
            self._metrics.close()
        self._link.close()

    def _fetch(self, request: Any, emit: Any) -> None:
        self._link.submit(next(self._handles), request, emit)

    def _watch(self) -> None:
        while not self._closing.wait(self._check_period):
            for call in list(self._calls.values()):
                if call.is_abandoned():
                    self._link.cancel(call.handle)


class _Call:
    """One client's request, from its first response to the last."""

    def __init__(
        self, handle: int, parsed: ParsedRequest, sender: Any, calls: dict[int, _Call]
    ) -> None:
        self.handle = handle
        self._parsed = parsed
        self._sender = sender
        self._calls = calls
        self._lock = threading.Lock()
        self._ended = False

    def emit(self, event: Any) -> None:
        """Send an event of the engine's; the sender must not be used after the last one."""
        ended = event.finish is not None or event.error is not None
        response = self._response(event)
        with self._lock:
            self._ended = ended
            self._sender.send(response, flags=_FINAL if ended else 0)
        if ended:
            self._calls.pop(self.handle, None)

    def is_abandoned(self) -> bool:
        """Whether the client has gone, as far as Triton knows."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def _response(self, event: Any) -> Any:
        if event.error is not None:
            return python_backend.failure(event.error, "Error generating stream: ")
        if event.finish == "cancelled":
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
            )
        return python_backend.response(tensors(self._parsed, event))
