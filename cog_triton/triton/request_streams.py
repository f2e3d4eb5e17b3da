"""Token transport of engines inside tritonserver: TensorRT-LLM's backend answers each request.

An engine has LoRA adapters in a cache, from which it drops those that were used least lately; after
a restart it is empty. A request whose adapter is not in it fails before its first token, and is
sent again after the adapter was loaded.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cog_triton.engines.generate_stream import ADAPTER_LOADER, STOP_INPUTS
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import GOES_ON, STOP, StepItem
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonMalformedEvent,
    TritonUnavailable,
)
from cog_triton.triton.infer_stream import (
    InferStream,
    Put,
    Tensor,
    ToError,
    contents,
    failure,
    infer_request,
    text_content,
    timed_out,
)

ENGINE_MODEL = "tensorrt_llm"
_FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "INT32": "i",
    "INT64": "q",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
}
_NOT_LOADED = re.compile(r"lora_task_id=\d+: not loaded")


class RequestStreams:
    """Sends each request to `tensorrt_llm`, on one stream; see `TokenTransport`.

    Requests may name an adapter, which is loaded when the engine lacks it.
    """

    def __init__(
        self,
        target: Callable[[], str],
        timeout: float,
        to_error: ToError,
        encode_request: Callable[[EngineRequest], dict[str, Any]],
        inputs: Mapping[str, ModelInput],
    ) -> None:
        """`target` is Triton's gRPC address, `inputs` are those of the model by name.

        `timeout` is in seconds between tokens of a request.
        """
        self._timeout = timeout
        self._encode_request = encode_request
        self._inputs = inputs
        self._numbers = itertools.count(1)
        self._running: set[_Request] = set()
        self._loading: dict[str, list[Callable[[CogTritonError | None], None]]] = {}
        self._loaded_at: dict[str, float] = {}
        self.stream = InferStream(target, to_error, self._check_timeouts)
        self.last_token_at = 0.0
        self.others_at = -math.inf
        self._most = 0

    def has_ended(self, replica: int | None) -> bool:
        """See `TokenTransport.has_ended`; a dead Triton's is gone."""
        return True

    async def open(self, generations: Mapping[int, int]) -> None:
        """See `TokenTransport.open`; the engine computes inside Triton."""
        self.stream.connect()

    async def disconnect(self) -> None:
        await self.stream.disconnect()

    def note_active(self, requests: int | None) -> None:
        if requests is None or requests > self._most:
            self.others_at = time.monotonic()
        self._most = len(self._running)

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> _Request:
        """See `TokenTransport.submit`; raises E1005 for a value that its input does not take."""
        values = {**self._encode_request(request), **engine_inputs}
        made = _Request(self, request, values, put)
        if not self.stream.wanted:
            raise TritonUnavailable("Triton is not connected; try again")
        self._running.add(made)
        self._most = max(self._most, len(self._running))
        made.send()
        return made

    def new_id(self) -> str:
        """Id of a request, which no other process's has."""
        return f"{os.getpid()}-{next(self._numbers)}"

    def encoded(self, request_id: str, values: Mapping[str, Any]) -> bytes:
        """The request of these input values; raises E1005."""
        tensors = {}
        for name, value in values.items():
            if name not in self._inputs:
                raise InvalidArgument(f"{name}: this engine does not support it")
            try:
                tensors[name] = self._inputs[name].tensor(value)
            except (struct.error, OverflowError, UnicodeEncodeError) as error:
                kind = self._inputs[name].datatype
                raise InvalidArgument(f"{name}: not of type {kind}: {error}") from None
        return infer_request(ENGINE_MODEL, request_id, tensors)

    def load(self, name: str, since: float, then: Callable[[CogTritonError | None], None]) -> None:
        """Load an adapter, unless that was done after `since`.

        `then` gets the error if it cannot be loaded.
        """
        if self._loaded_at.get(name, 0.0) > since:
            then(None)
        elif name in self._loading:
            self._loading[name].append(then)
        else:
            self._loading[name] = [then]
            request_id = self.new_id()
            tensor = Tensor("BYTES", (1,), text_content(name.encode()))
            request = infer_request(ADAPTER_LOADER, request_id, {"lora_name": tensor})
            receiver = _Loading(partial(self._loaded, name))
            self.stream.send(request_id, request, receiver, whole=True)

    def forget(self, request: _Request) -> None:
        """Watch a request no longer, since it has ended."""
        self._running.discard(request)

    def _loaded(self, name: str, error: CogTritonError | None) -> None:
        if error is None:
            self._loaded_at[name] = time.monotonic()
        for then in self._loading.pop(name):
            then(error)

    def _check_timeouts(self, now: float) -> None:
        for request in self._running.copy():
            if now - request.last_at > self._timeout:
                request.stop()
                request.on_failure(timed_out(self._timeout))


class ModelInput:
    """An input of a model: `datatype` as requests name it, and `dims` with the batch's.

    -1 is any size, for one of the dimensions.
    """

    def __init__(self, datatype: str, dims: Sequence[int]) -> None:
        self.datatype = datatype
        self._dims = dims

    def tensor(self, value: Any) -> Tensor:
        """A value, or a flat list of them, as a tensor."""
        values = value if isinstance(value, list) else [value]
        known = math.prod(size for size in self._dims if size >= 0)
        shape = tuple(size if size >= 0 else len(values) // known for size in self._dims)
        if self.datatype == "BYTES":
            content = b"".join(text_content(str(text).encode()) for text in values)
        else:
            content = struct.pack(f"<{len(values)}{_FORMATS[self.datatype]}", *values)
        return Tensor(self.datatype, shape, content)


def model_inputs(config: Any) -> Mapping[str, ModelInput]:
    """The inputs of a model, by its ModelConfig."""
    batch = [1] if config.max_batch_size else []
    return {item.name: ModelInput(_datatype(item), [*batch, *item.dims]) for item in config.input}


def _datatype(item: Any) -> str:
    field = item.DESCRIPTOR.fields_by_name["data_type"]
    name = field.enum_type.values_by_number[item.data_type].name.removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else str(name)


class _Request:
    replica = 0

    def __init__(
        self,
        streams: RequestStreams,
        request: EngineRequest,
        values: Mapping[str, Any],
        put: Put,
    ) -> None:
        self._streams = streams
        self._request = request
        self._values = values
        self._encode()
        self._put = put
        self._whole = not values["streaming"]
        repeats = self._whole and not values.get("exclude_input_in_output")
        self._prompt = list(request.input_ids) if repeats else []
        self._count = 0
        self._ended = self._sent = False
        self._again = request.adapter is not None
        self.last_at = self._sent_at = time.monotonic()

    def _encode(self) -> None:
        self._id = self._streams.new_id()
        self._content = self._streams.encoded(self._id, self._values)

    def send(self) -> None:
        """Send it, unless it was cancelled."""
        if not self._ended:
            self._sent = True
            self._sent_at = time.monotonic()
            self._streams.stream.reconnect()
            self._streams.stream.send(self._id, self._content, self, whole=self._whole)

    def cancel(self) -> None:
        """See `Submission.cancel`."""
        if not self._ended:
            self._ended = True
            self._streams.forget(self)
            self.stop()

    def stop(self) -> None:
        """Stop it by its id, and drop what still comes."""
        self._streams.stream.forget(self._id)
        if self._sent:
            values = {**STOP_INPUTS, "streaming": not self._whole}
            content = self._streams.encoded(self._id, values)
            self._streams.stream.send(self._id, content, whole=self._whole)

    def on_response(self, response: Any, last: bool) -> None:
        if self._ended:
            return
        self.last_at = self._streams.last_token_at = time.monotonic()
        try:
            outputs = contents(response)
            if outputs or not last:
                self._take(outputs)
        except TritonMalformedEvent as error:
            if not last:
                self.stop()
            self.on_failure(error)
            return
        if last:
            self._end(StepItem(0, 0, self._count, [], [], STOP))

    def on_failure(self, error: CogTritonError) -> None:
        if self._ended:
            return
        if self._again and _NOT_LOADED.search(str(error)):
            self._again = self._sent = False
            self._encode()  # something may still come for the old id
            self.last_at = time.monotonic()
            self._streams.load(self._request.adapter or "", self._sent_at, self._adapter_loaded)
            return
        self._end(failure(0, error))

    def _adapter_loaded(self, error: CogTritonError | None) -> None:
        self.last_at = time.monotonic()
        if error is None:
            self.send()
        elif not self._ended:
            self._end(failure(0, error))

    def _end(self, item: StepItem) -> None:
        self._ended = True
        self._streams.forget(self)
        self._put(item)

    def _take(self, outputs: Mapping[str, tuple[str, bytes]]) -> None:
        ids = _numbers(outputs, "output_ids", "INT32")
        if self._whole:
            ids = self._generated(ids, outputs)
        log_probs: list[float] = []
        if self._request.return_log_probs:
            values = _numbers(outputs, "output_log_probs", "FP32")
            if len(values) < len(ids):
                raise TritonMalformedEvent("no output_log_probs for its tokens")
            # The last ones, where an engine repeats earlier ones.
            log_probs = values[len(values) - len(ids) :]
        if ids:
            offset, width = self._count, int(self._request.return_log_probs)
            self._count += len(ids)  # first: who gets the item may cancel at once
            self._put(StepItem(0, 0, offset, ids, log_probs, GOES_ON, None, width))

    def _generated(self, ids: list[int], outputs: Mapping[str, tuple[str, bytes]]) -> list[int]:
        """The new ids of a whole answer, which may begin with the prompt and end in padding."""
        if "sequence_length" in outputs:
            ids = ids[: sum(_numbers(outputs, "sequence_length", "INT32"))]
        size = len(self._prompt)
        return ids[size:] if ids[:size] == self._prompt else ids


class _Loading:
    def __init__(self, on_end: Callable[[CogTritonError | None], None]) -> None:
        self.on_failure = on_end

    def on_response(self, response: Any, last: bool) -> None:
        if last:
            self.on_failure(None)


def _numbers(outputs: Mapping[str, tuple[str, bytes]], name: str, datatype: str) -> list[Any]:
    """The values of an output; raises E2104 if it is missing, or of another type."""
    found, content = outputs.get(name, ("none", b""))
    form = f"<{_FORMATS[datatype]}"
    if found != datatype or len(content) % struct.calcsize(form):
        raise TritonMalformedEvent(f"{name}: {found}, {len(content)} bytes; must be {datatype}")
    return [value for (value,) in struct.iter_unpack(form, content)]
