"""The Triton Python-backend model that puts a `TokenEngine` behind the numeric contract.

Decoupled: every engine step becomes one response, and several steps one response when the
reader is behind. Runs inside Triton's stub process, so it imports little.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from cog_triton.engines import contract
from cog_triton.engines.base import EngineRequest, EngineStats, TokenEngine, TokenEvent
from cog_triton.errors import CogTritonError, FrameworkError, InvalidArgument

OpenEngine = Callable[[Mapping[str, str]], TokenEngine]


class Stream:
    """One request on its way out: collects events until the sender thread takes them."""

    def __init__(self, request_id: str, request: EngineRequest, sender: Any, ready: Any) -> None:
        self.request_id = request_id
        self.handle = 0
        self.done = False
        self._request = request
        self._sender = sender
        self._ready = ready
        self._lock = threading.Lock()
        self._events: list[TokenEvent] = []
        self._queued = False
        self._token_count = 0

    def emit(self, event: TokenEvent) -> None:
        """Called by the engine after a step; queues this stream unless it is queued already."""
        with self._lock:
            self._events.append(event)
            queued, self._queued = self._queued, True
        if not queued:
            self._ready.put(self)

    def send(self) -> None:
        """Send everything collected so far as one response."""
        with self._lock:
            self._queued = False
            if not self._events:
                return
            ended = self._events[-1].finish is not None or self._events[-1].error is not None
            if not (ended or self._request.streaming):
                # Without streaming all tokens stay here, unsent, until the last event.
                self._events = [_join(self._events)]
                return
            events, self._events = self._events, []
        joined = _join(events)
        self.done = ended
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if ended else 0
        if joined.error is not None:
            self._sender.send(_error_response(joined.error), flags=flags)
        elif joined.token_ids or not self._request.streaming:
            self._sender.send(self._response(joined), flags=flags)
        else:
            self._sender.send(flags=flags)

    def is_cancelled(self) -> bool:
        """Whether the client has gone; costs a round trip to the server."""
        return bool(self._sender.is_cancelled())

    def _response(self, event: TokenEvent) -> Any:
        request = self._request
        ids = event.token_ids
        self._token_count += len(ids)
        if not (request.streaming or request.exclude_input_in_output):
            ids = [*request.input_ids, *ids]
        tensors = [
            _tensor("output_ids", [[ids]], np.int32),
            _tensor("sequence_length", [[len(ids)]], np.int32),
        ]
        if request.return_log_probs:
            tensors.append(_tensor("output_log_probs", [[event.log_probs]], np.float32))
            tensors.append(_tensor("cum_log_probs", [[sum(event.log_probs)]], np.float32))
        if request.return_num_input_tokens:
            tensors.append(_tensor("num_input_tokens", [[len(request.input_ids)]], np.int32))
        if request.return_num_output_tokens:
            tensors.append(_tensor("num_output_tokens", [[self._token_count]], np.int32))
        return pb_utils.InferenceResponse(output_tensors=tensors)


class TritonTokenModel:
    """Base of the generated ``TritonPythonModel``; `open_engine` is bound by `triton_model`."""

    open_engine: OpenEngine

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine; an exception here ends tritonserver with its text in the log."""
        config = json.loads(args["model_config"])
        parameters = {name: item["string_value"] for name, item in config["parameters"].items()}
        self._input_names = [item["name"] for item in config["input"]]
        self._check_period = int(parameters["cancellation_check_period_ms"]) / 1000
        self._engine = type(self).open_engine(parameters)
        self._streams: dict[int, Stream] = {}
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._metrics = _Metrics(args["model_name"], args["model_version"])
        self._sender = threading.Thread(target=self._send_loop, name="sender", daemon=True)
        self._sender.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine; responses are sent by the sender thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except CogTritonError as error:
                sender.send(
                    _error_response(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                )

    def finalize(self) -> None:
        """Cancel what still runs and stop both threads."""
        self._engine.close()
        self._ready.put(None)
        self._sender.join()

    def _accept(self, request: Any, sender: Any) -> None:
        contract.refuse_unknown(json.loads(request.parameters() or "{}"), self._input_names)
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        request_id = request.request_id()
        if "stop" in tensors and tensors["stop"].any():
            self._stop(request_id, sender)
            return
        parsed = contract.from_tensors(tensors)
        stream = Stream(request_id, parsed, sender, self._ready)
        with self._lock:
            stream.handle = self._engine.submit(parsed, stream.emit)
            self._streams[stream.handle] = stream
        self._ready.put(stream)

    def _stop(self, request_id: str, sender: Any) -> None:
        """TensorRT-LLM's second way to cancel: the same request id again with stop=true."""
        if not request_id:
            raise InvalidArgument(
                "stop=True: Trying to stop a request but request ID is not provided"
            )
        with self._lock:
            handles = [s.handle for s in self._streams.values() if s.request_id == request_id]
        for handle in handles:
            self._engine.cancel(handle)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send_loop(self) -> None:
        next_check = 0.0
        while True:
            try:
                stream = self._ready.get(timeout=self._check_period if self._streams else None)
            except queue.Empty:
                pass
            else:
                if stream is None:
                    return
                stream.send()
                if stream.done:
                    with self._lock:
                        self._streams.pop(stream.handle, None)
            if (now := time.monotonic()) >= next_check:
                next_check = now + self._check_period
                self._cancel_abandoned()
            self._metrics.publish(self._engine.stats())

    def _cancel_abandoned(self) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            if stream.is_cancelled():
                self._engine.cancel(stream.handle)


def triton_model(open_engine: OpenEngine) -> type[TritonTokenModel]:
    """The class a rendered ``model.py`` exposes as ``TritonPythonModel``."""
    return type("TritonPythonModel", (TritonTokenModel,), {"open_engine": staticmethod(open_engine)})


class _Metrics:
    """The engine's counts under TensorRT-LLM's own metric names, on Triton's /metrics."""

    def __init__(self, model: str, version: str) -> None:
        labels = {"model": model, "version": version}
        self._requests = pb_utils.MetricFamily(
            name="nv_trt_llm_request_metrics",
            description="TRT LLM request metrics",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._blocks = pb_utils.MetricFamily(
            name="nv_trt_llm_kv_cache_block_metrics",
            description="TRT LLM KV cache block metrics",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._gauges = {
            name: self._requests.Metric(labels={**labels, "request_type": name})
            for name in ("active", "waiting", "max")
        }
        self._kv_usage = self._blocks.Metric(labels={**labels, "kv_cache_block_type": "fraction"})
        self._published: EngineStats | None = None

    def publish(self, stats: EngineStats) -> None:
        """Set the gauges; each costs a round trip, so only when a count has changed."""
        old = self._published
        if old and (old.active, old.waiting) == (stats.active, stats.waiting):
            return
        self._published = stats
        self._gauges["active"].set(stats.active)
        self._gauges["waiting"].set(stats.waiting)
        self._gauges["max"].set(stats.max_batch_size)
        self._kv_usage.set(stats.kv_cache_usage)


def _join(events: list[TokenEvent]) -> TokenEvent:
    last = events[-1]
    if len(events) == 1:
        return last
    return TokenEvent(
        [token for event in events for token in event.token_ids],
        [value for event in events for value in event.log_probs],
        last.finish,
        last.error,
    )


def _tensor(name: str, values: Any, dtype: Any) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))


def _error_response(error: CogTritonError) -> Any:
    code = (
        pb_utils.TritonError.INTERNAL
        if isinstance(error, FrameworkError)
        else pb_utils.TritonError.INVALID_ARG
    )
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
