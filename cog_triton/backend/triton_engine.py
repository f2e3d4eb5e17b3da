"""Engines that compute inside tritonserver, as clients in stubs call them: TensorRT-LLM's.

Requests go to the engine's model over HTTP, or as a BLS call for tensors that JSON does not carry.
BLS calls that run at once lock up the stub of Triton 24.10: one thread has the GIL and waits for
the map of response iterators, the queue monitor has the map and waits for an iterator, and the
thread in that one's `Next` waits for the GIL. So there is one at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from cog_triton.backend.answers import EngineResponse
from cog_triton.backend.text_inputs import Tensors
from cog_triton.engines.generate_stream import STOP_INPUTS, GenerateStream
from cog_triton.engines.tensorrt_llm import backend_errors
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonMalformedEvent,
    TritonUnavailable,
    TritonUnknownError,
    from_text,
)

_log = logging.getLogger(__name__)

_RELEASE_DELAY_S = _STOP_TIMEOUT_S = 5.0
_TOKENS = ("output_ids", "sequence_length")
_LOGITS = ("return_context_logits", "return_generation_logits")


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to the engine's model; `outputs` are those to return beside the token ids."""

    request_id: str
    inputs: Tensors
    outputs: Collection[str]


class TritonEngine:
    """The engine's model, with the interface of `EngineClient`; thread-safe."""

    def __init__(self, model: str, outputs: Sequence[Mapping[str, Any]] = ()) -> None:
        """`outputs` are those of the model's config."""
        self.model = model
        self.outputs = {output["name"]: output for output in outputs}
        self.turn = threading.Lock()
        self._calls: dict[int, _HTTPCall | _BLSCall] = {}

    def start(self) -> None:
        """Nothing: each request has a connection of its own."""

    def close(self) -> None:
        """Nothing: Triton has ended all requests."""

    def submit(
        self,
        handle: int,
        request: ModelRequest,
        emit: Callable[[EngineResponse], None],
        prompt: object = None,
    ) -> None:
        """Send a request under a new handle; `emit` runs on a thread of its own."""
        call = self._calls[handle] = self.call(request)
        threading.Thread(target=self._run, args=[handle, call, emit], daemon=True).start()

    def cancel(self, handle: int) -> None:
        """Stop a request; it ends with what it has. May need to be repeated."""
        if call := self._calls.get(handle):
            call.cancel()

    def call(self, request: ModelRequest) -> _HTTPCall | _BLSCall:
        """Prepare a request, which is sent when it is iterated; raises the engine's coded error.

        Closing the iterator stops the engine. Its `cancel` does, too, from any thread; then it ends
        without an error.
        """
        inputs = request.inputs
        # LoRA weights and logits have several variable dimensions and may be FP16: not for JSON.
        if "lora_weights" in inputs or any(inputs[n].any() for n in _LOGITS if n in inputs):
            return _BLSCall(self, request)
        return _HTTPCall(self, request)

    def stop(self, request_id: str, *, streaming: bool = True) -> None:
        """Stop a request by its id, in a round trip.

        While it is queued or in prefill, Triton does not notice a closed connection. `streaming` is
        False for a model that is not decoupled.
        """
        values = {**STOP_INPUTS, "streaming": streaming}
        stop = GenerateStream(self.model, request_id, values, to_error, _STOP_TIMEOUT_S)
        try:
            for _ in stop.events():
                pass
        except CogTritonError as error:
            _log.warning("could not stop request %s: %s", request_id, error)

    def stop_soon(self, request_id: str, *, streaming: bool) -> None:
        """Stop a request by its id, without waiting for it."""
        stop = threading.Thread(
            target=self.stop, args=[request_id], kwargs={"streaming": streaming}, daemon=True
        )
        stop.start()

    def _run(
        self, handle: int, call: _HTTPCall | _BLSCall, emit: Callable[[EngineResponse], None]
    ) -> None:
        error: CogTritonError | None = None
        try:
            with closing(iter(call)) as responses:
                for response in responses:
                    emit(response)
        except CogTritonError as caught:
            error = caught
        except Exception:  # noqa: BLE001 - the client must have an answer
            _log.exception("a request to the engine failed")
            error = TritonUnknownError("a text model failed; see Triton's log")
        del self._calls[handle]
        emit(EngineResponse([], {}, finish="stop", error=error))


def to_error(text: str) -> CogTritonError:
    """The coded error of a failed engine request's text."""
    return from_text(text) or backend_errors.request_error(text) or TritonUnknownError(text)


class _HTTPCall:
    def __init__(self, engine: TritonEngine, request: ModelRequest) -> None:
        self._engine = engine
        self._request = request
        values = {name: _json_value(name, tensor) for name, tensor in request.inputs.items()}
        self._stream = GenerateStream(engine.model, request.request_id, values, to_error)
        self._streaming = bool(request.inputs["streaming"].any())
        self._cancelled = False

    def __iter__(self) -> Generator[EngineResponse, None, None]:
        seen = False
        events = self._stream.events()
        try:
            for event in events:
                seen = True
                yield self._response(event)
        except TritonUnavailable:
            if not self._cancelled:
                raise
        finally:
            events.close()
            # A closed connection stops the engine when Triton writes to it, so not before the
            # first token.
            if self._cancelled and self._streaming and not seen:
                self._engine.stop(self._request.request_id)

    def cancel(self) -> None:
        self._cancelled = True
        if self._streaming:
            self._stream.abort()
        else:  # stopped, it answers with what it has
            self._engine.stop_soon(self._request.request_id, streaming=False)

    def _response(self, event: dict[str, Any]) -> EngineResponse:
        if not event.keys() >= {*_TOKENS}:
            raise TritonMalformedEvent(f"no {' or '.join(_TOKENS)} in {sorted(event)}")
        known = self._engine.outputs
        return EngineResponse(
            _beams(event["output_ids"], event["sequence_length"]),
            {
                name: _restored(known[name], event[name])
                for name in self._request.outputs
                if name in event and name in known
            },
            event.get("sequence_index", 0),
        )


class _BLSCall:
    """A BLS call, one at a time from `exec` to its last response; it is stopped over HTTP."""

    def __init__(self, engine: TritonEngine, request: ModelRequest) -> None:
        self._engine = engine
        self._request = request
        self._cancelled = False

    def __iter__(self) -> Generator[EngineResponse, None, None]:
        request = self._request
        call = pb_utils.InferenceRequest(
            model_name=self._engine.model,
            request_id=request.request_id,
            inputs=[pb_utils.Tensor(name, tensor) for name, tensor in request.inputs.items()],
            requested_output_names=[*_TOKENS, *request.outputs],
        )
        with self._engine.turn:
            if self._cancelled:
                return
            try:
                yield from self._responses(call.exec(decoupled=True))
            except pb_utils.TritonModelException as error:
                raise TritonUnknownError(str(error)) from error

    def cancel(self) -> None:
        self._cancelled = True
        streaming = bool(self._request.inputs["streaming"].any())
        self._engine.stop_soon(self._request.request_id, streaming=streaming)

    def _responses(self, responses: Iterator[Any]) -> Iterator[EngineResponse]:
        try:
            for response in responses:
                if response.has_error():
                    raise to_error(response.error().message())
                if tensors := response.output_tensors():
                    # The response's memory goes back to Triton with the response.
                    outputs = {tensor.name(): tensor.as_numpy().copy() for tensor in tensors}
                    lengths = outputs.pop("sequence_length").ravel().tolist()
                    beams = _beams(outputs.pop("output_ids").ravel().tolist(), lengths)
                    index = outputs.pop("sequence_index", np.zeros(1, dtype=np.int32))
                    yield EngineResponse(beams, outputs, int(index.flat[0]))
        except GeneratorExit:
            self.cancel()
            for _ in responses:
                pass
            raise
        finally:
            # The stub (24.10) drops its reference on a thread without the GIL. If that were the
            # last one, tensors would be freed there, which crashes Python 3.12.
            timer = threading.Timer(_RELEASE_DELAY_S, id, [responses])
            timer.daemon = True
            timer.start()


def _beams(ids: Any, lengths: Any) -> list[list[int]]:
    """The rows of padded `ids`, flat as JSON has them; Triton writes a single one bare."""
    ids, lengths = (v if isinstance(v, list) else [v] for v in (ids, lengths))
    width = len(ids) // len(lengths)
    return [ids[row * width :][:length] for row, length in enumerate(lengths)]


def _json_value(name: str, tensor: npt.NDArray[Any]) -> Any:
    """Flat JSON values, exact in all types; NaN and infinities as Triton writes and reads them."""
    values = tensor.ravel().tolist()
    if tensor.dtype != np.object_:
        return values
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: not UTF-8: {error.reason} at {error.start}") from error


def _restored(output: Mapping[str, Any], values: Any) -> npt.NDArray[Any]:
    """The tensor of flat JSON `values`, with its batch dimension; Triton writes a single one bare.

    Of several variable dimensions all but the last are 1 here: beams and sequences.
    """
    inner = [1 for _ in output["dims"]]
    dtype = pb_utils.triton_string_to_numpy(output["data_type"])
    try:
        return np.array(values, dtype=dtype).reshape(*inner, -1)
    except (ValueError, TypeError, OverflowError) as error:
        raise TritonMalformedEvent(f"{output['name']}: {error}") from error
