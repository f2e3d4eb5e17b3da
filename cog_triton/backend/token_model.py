"""Triton model ``tensorrt_llm`` of Python engines: an `EngineClient` behind the tensor contract.

Decoupled, every engine step becomes one response; else there is one in the end. Runs inside
Triton's stub process, so it imports little.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.request_metrics import RequestMetrics
from cog_triton.engines import tensor_contract
from cog_triton.engines.base import COALESCE
from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_spec import own_addresses
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.system import process_tuning


class ResponseStream:
    """Response stream of one request: turns the engine's events into Triton responses.

    `emit` runs on the thread that brings the engine's events, and sends at once.
    """

    def __init__(
        self,
        handle: int,
        request_id: str,
        request: EngineRequest,
        sender: Any,
        model: Any,
        indices: Set[str],
        line: triton_log.RequestLine,
    ) -> None:
        """`indices` are the names of outputs that are 0: of the only prompt and sequence."""
        self.handle = handle
        self._indices = indices
        self.request_id = request_id
        self._request = request
        self._sender = sender
        self._model = model
        self._held: list[TokenEvent] = []
        self._token_count = 0
        self._log_prob = 0.0
        self._next_check = 0.0
        self._line = line
        line.prompt_tokens = len(request.input_ids)

    def emit(self, event: TokenEvent) -> None:
        """Send an event; without streaming, keep it until the last one."""
        ended = event.finish is not None or event.error is not None
        if event.error is None:
            self._line.arrived(len(event.token_ids))
        if ended:
            self._line.ended(event.error or event.finish)
        if not self._request.streaming:
            self._held.append(event)
            if ended:
                self._send(TokenEvent.coalesce(self._held), ended)
        else:
            self._send(event, ended)
        if ended:
            self._model.ended(self)
            self._model.publish()
        elif (now := time.monotonic()) >= self._next_check:
            self._next_check = now + self._model.check_period
            if self._sender.is_cancelled():
                self._model.cancel(self)

    def _send(self, event: TokenEvent, ended: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if ended else 0
        if event.error is not None:
            self._sender.send(python_backend.error_response(event.error), flags=flags)
        elif event.token_ids or ended:
            python_backend.send(self._sender, self._response(event), flags)

    def _response(self, event: TokenEvent) -> Any:
        request = self._request
        ids = event.token_ids
        self._token_count += len(ids)
        self._log_prob += sum(event.log_probs)
        if not (request.streaming or request.exclude_input_in_output):
            ids = [*request.input_ids, *ids]
        tensors = [
            _tensor("output_ids", [[ids]], np.int32),
            _tensor("sequence_length", [[len(ids)]], np.int32),
        ]
        if event.finish is not None:
            tensors.append(_tensor(tensor_contract.FINISH_REASON, [[event.finish]], np.object_))
        tensors += [_tensor(name, [[0]], np.int32) for name in self._indices]
        if request.return_log_probs:
            tensors.append(_tensor("output_log_probs", [[event.log_probs]], np.float32))
            tensors.append(_tensor("cum_log_probs", [[self._log_prob]], np.float32))
        if request.return_num_input_tokens:
            tensors.append(_tensor("num_input_tokens", [[len(request.input_ids)]], np.int32))
        if request.return_num_output_tokens:
            tensors.append(_tensor("num_output_tokens", [[self._token_count]], np.int32))
        return pb_utils.InferenceResponse(output_tensors=tensors)


class TokenModel:
    """Base of the generated ``TritonPythonModel``, whose `decode_request` reads input tensors."""

    decode_request = staticmethod(tensor_contract.decode_request)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Wait for the engine; an exception ends tritonserver, with its text in the log."""
        triton_log.install()
        self._name = args["model_name"]
        parameters = python_backend.Parameters(args)
        self._input_names, self._output_count = parameters.inputs, len(parameters.outputs)
        self._indices = frozenset({"batch_index", "sequence_index"})
        self._decoupled = parameters.decoupled
        self.check_period = parameters.positive_int("cancellation_check_period_ms") / 1000
        self._streams: dict[int, ResponseStream] = {}
        self._handles = itertools.count(1)
        joins = parameters.flag(COALESCE)
        self._engine = EngineClient(own_addresses(), "owner", coalesce=joins)
        self._engine.start()
        self._engine.wait_until_linked()
        self._metrics = RequestMetrics(args, self._engine.stats)
        self._engine.on_kv_cache = self.publish = self._metrics.publish
        process_tuning.tune_for_serving()

    def execute(self, requests: list[Any]) -> None:
        """Submit requests to the engine, whose events send the responses."""
        for request in requests:
            sender = request.get_response_sender()
            line = triton_log.RequestLine(self._name, request.request_id())
            try:
                self._accept(request, sender, line)
            except CogTritonError as error:
                line.ended(error)
                sender.send(
                    python_backend.error_response(error),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )

    def finalize(self) -> None:
        """Stop the engine and all threads."""
        self._engine.close()
        self._metrics.close()

    def cancel(self, stream: ResponseStream) -> None:
        """Cancel a request whose client has disconnected."""
        self._engine.cancel(stream.handle)

    def ended(self, stream: ResponseStream) -> None:
        """Forget a request that has sent its last response."""
        self._streams.pop(stream.handle, None)

    def _accept(self, request: Any, sender: Any, line: triton_log.RequestLine) -> None:
        tensor_contract.check_parameters(
            python_backend.request_parameters(request), self._input_names
        )
        tensors = python_backend.input_tensors(request)
        request_id = request.request_id()
        if "stop" in tensors and tensors["stop"].any():
            self._stop(request_id, sender)
            return
        parsed = self.decode_request(tensors)
        if parsed.streaming and not self._decoupled:
            raise InvalidArgument(
                "streaming=True: Streaming is only supported if model is deployed using decoupled"
                " mode: tensorrt_llm.args.decoupled_mode"
            )
        stream = ResponseStream(
            next(self._handles), request_id, parsed, sender, self, self._asked(request), line
        )
        self._streams[stream.handle] = stream
        self._engine.submit(stream.handle, parsed, stream.emit)
        self.publish()

    def _stop(self, request_id: str, sender: Any) -> None:
        """Cancel by request id, as TensorRT-LLM does for a second request with stop=true."""
        if not request_id:
            raise InvalidArgument(
                "stop=True: Trying to stop a request but request ID is not provided"
            )
        for stream in self._streams.copy().values():
            if stream.request_id == request_id:
                self._engine.cancel(stream.handle)
        if self._decoupled:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(
                python_backend.response({}), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )

    def _asked(self, request: Any) -> Set[str]:
        """The indices that a client asked for by name; all who name nothing do without."""
        names = request.requested_output_names()
        return self._indices & set(names) if len(names) < self._output_count else frozenset()


def _tensor(name: str, values: Any, dtype: Any) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))
