"""Triton's gRPC stream: all requests of one client to a Triton, on one ``ModelStreamInfer``.

The stream is ordered, and loses nothing. A response has the id of its request, and goes to the
receiver of that id. Nobody cancels the stream while it works: tritonserver before 25.01 may die of
a cancelled one. Requests to models that answer once, which are not decoupled, have calls of their
own beside it: on a stream Triton sends their answers in the order of the requests.

A token transport brings requests to the engine's model, and the tokens of each as they are made:
`step_stream` those of all requests in one response a step, `request_streams` in a response for
each request's, from backends whose model is not ours.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import grpc.aio

from cog_triton.engines import model_config_proto
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import ERROR, StepItem
from cog_triton.errors import CogTritonError, TritonTimeout, TritonUnavailable
from cog_triton.system.printable import printable

_log = logging.getLogger(__name__)

ToError = Callable[[str], CogTritonError]
"""The coded error behind an error text of the engine or of Triton."""
service_pb2 = model_config_proto.service()
TICK_S = 0.1
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_WHOLE = "/inference.GRPCInferenceService/ModelInfer"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel waits for an older one's backoff
)
_GOODBYE_S = 2.0
_FINAL = "triton_final_response"


class Tensor(NamedTuple):
    """An input: Triton's name of its type, its shape with the batch's, and its content."""

    datatype: str
    shape: tuple[int, ...]
    content: bytes


class Receiver(Protocol):
    """Callbacks of one request; they must not block."""

    def on_response(self, response: Any, last: bool) -> None:
        """A ModelInferResponse, and whether none follows."""

    def on_failure(self, error: CogTritonError) -> None:
        """The error that ended the request, of the model or of the connection."""


def infer_request(
    model: str, request_id: str, inputs: Mapping[str, Tensor], *, ends: bool = True
) -> bytes:
    """An encoded ModelInferRequest; with `ends` its last response comes though it be empty."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if ends:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, tensor in inputs.items():
        request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.content)
    return bytes(request.SerializeToString())


def text_content(text: bytes) -> bytes:
    """The content of a tensor of type BYTES with one text."""
    return struct.pack("<I", len(text)) + text


def contents(response: Any) -> dict[str, tuple[str, bytes]]:
    """Type and content of each output of a ModelInferResponse, by name."""
    return {
        output.name: (output.datatype, content)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def timed_out(seconds: float) -> TritonTimeout:
    """E2101 for a request that got nothing for `seconds`."""
    return TritonTimeout(
        f"Triton timed out: nothing arrived for {seconds:g} s (TRITON_TIMEOUT). This can happen for"
        " extremely long prompts or large batches; try a shorter prompt, or send requests more"
        " slowly."
    )


class InferStream:
    """One stream, on the event loop. It is connected again by whoever needs it.

    A break ends all requests with E2105.
    """

    def __init__(
        self,
        target: Callable[[], str],
        to_error: ToError,
        on_tick: Callable[[float], None] = lambda now: None,
    ) -> None:
        """`target` is the gRPC address of the Triton that runs, ``unix:PATH`` or ``host:port``.

        `on_tick` is called every `TICK_S` while it is wanted, with time.monotonic().
        """
        self._target = target
        self._to_error = to_error
        self._on_tick = on_tick
        self._timer: asyncio.TimerHandle | None = None
        self._receivers: dict[str, Receiver] = {}
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._channel: grpc.aio.Channel
        self._call: Any = None
        self._idle: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self.wanted = False
        """Whether it is connected, or is to be connected again."""

    @property
    def connected(self) -> bool:
        """Whether requests can be sent now."""
        return self._call is not None

    def connect(self) -> None:
        """Connect, unless that is done. Requests fail if nothing listens there."""
        self.wanted = True
        self.reconnect()
        if self._timer is None:
            self._tick()

    def reconnect(self) -> None:
        """Connect again, unless it is connected, or is not wanted."""
        if self.wanted and self._call is None:
            # Without any channel gRPC ends; if it starts with no descriptor left, it aborts us.
            self._idle = self._idle or grpc.aio.insecure_channel("unix:/")
            self._channel = channel = grpc.aio.insecure_channel(self._target(), options=_OPTIONS)
            self._call = call = channel.stream_stream(_STREAM)()
            self._outbox = asyncio.Queue()
            self._tasks = [
                asyncio.ensure_future(self._write(call, self._outbox)),
                asyncio.ensure_future(self._read(channel, call)),
            ]

    async def disconnect(self) -> None:
        """End the stream, which Triton's end would wait for; requests that run fail."""
        self.wanted = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        call, self._call = self._call, None
        if call is None:
            return
        self._fail_all(TritonUnavailable("the server is stopping; try again"))
        writer, reader = self._tasks
        self._outbox.put_nowait(None)
        await asyncio.wait({writer}, timeout=_GOODBYE_S)
        await asyncio.wait({reader}, timeout=_GOODBYE_S)
        call.cancel()
        await asyncio.gather(writer, reader, *self._calls, return_exceptions=True)

    def send(
        self,
        request_id: str,
        request: bytes,
        receiver: Receiver | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Send an encoded request.

        `receiver` gets what comes for `request_id` until it ends, or is forgotten; without one, an
        earlier request's does. It fails at once while there is no connection. The model of a
        request that is `whole` answers once.
        """
        if self._call is None:
            if receiver is not None:
                receiver.on_failure(TritonUnavailable("Triton is not connected; try again"))
            return
        if receiver is not None:
            self._receivers[request_id] = receiver
        if whole:
            call = asyncio.ensure_future(self._ask(request_id, request))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        else:
            self._outbox.put_nowait(request)

    def forget(self, request_id: str) -> None:
        """Drop what still comes for a request."""
        self._receivers.pop(request_id, None)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._on_tick(time.monotonic())

    async def _write(self, call: Any, outbox: asyncio.Queue[bytes | None]) -> None:
        """Send what is in the outbox, up to None, the end of our half of the stream."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `_read` says why
            while (request := await outbox.get()) is not None:
                await call.write(request)
            await call.done_writing()

    async def _ask(self, request_id: str, request: bytes) -> None:
        try:
            content = await self._channel.unary_unary(_WHOLE)(request)
        except grpc.aio.AioRpcError as error:
            lost = error.code() is grpc.StatusCode.UNAVAILABLE
            text = printable(error.details() or "")
            failure = TritonUnavailable(f"{text}; try again") if lost else self._to_error(text)
            self._fail(request_id, failure)
        else:
            if receiver := self._receivers.pop(request_id, None):
                receiver.on_response(service_pb2.ModelInferResponse.FromString(content), True)

    async def _read(self, channel: grpc.aio.Channel, call: Any) -> None:
        reason = "Triton has ended the stream"
        try:
            async for content in call:
                self._take(service_pb2.ModelStreamInferResponse.FromString(content))
        except grpc.aio.AioRpcError as error:
            reason = f"the connection to Triton ended: {printable(error.details() or '')}"
        except asyncio.CancelledError:
            reason = "the connection to Triton was ended"
        except Exception:  # noqa: BLE001 - it serves all other requests, too
            _log.exception("a response of Triton could not be handled")
            reason = "a response of Triton could not be handled"
        finally:
            call.cancel()
            if self._call is call:
                self._call = None
                self._outbox.put_nowait(None)
                self._fail_all(TritonUnavailable(f"{reason}; try again"))
            await channel.close()

    def _take(self, message: Any) -> None:
        response = message.infer_response
        if message.error_message:
            self._fail(response.id, self._to_error(message.error_message))
            return
        receiver = self._receivers.get(response.id)
        if receiver is None:
            return
        last = _FINAL in response.parameters and response.parameters[_FINAL].bool_param
        if last:
            del self._receivers[response.id]
        receiver.on_response(response, last)

    def _fail(self, request_id: str, error: CogTritonError) -> None:
        if receiver := self._receivers.pop(request_id, None):
            receiver.on_failure(error)

    def _fail_all(self, error: CogTritonError) -> None:
        for request_id in list(self._receivers):
            self._fail(request_id, error)


Put = Callable[[StepItem], None]
"""Takes an item of a request; must not block."""


class Submission(Protocol):
    """A request that was handed to the engine `replica`, 0 if there is only one."""

    replica: int

    def cancel(self) -> None:
        """Stop the engine's work on it; items may still arrive."""


class TokenTransport(Protocol):
    """Way to the engine and back."""

    @property
    def last_token_at(self) -> float:
        """When any request last got something of the engine, by time.monotonic()."""

    @property
    def others_at(self) -> float:
        """When the engine last had requests that are not ours; inf while it has."""

    def has_ended(self, replica: int | None) -> bool:
        """Whether all has come that a dead engine has sent, of several that `replica`."""

    def note_active(self, requests: int | None) -> None:
        """An engine inside tritonserver has so many requests; None if Triton does not say."""

    async def open(self, generations: Mapping[int, int]) -> None:
        """Connect, after Triton has started; raises E2105 if that fails.

        It is open once an engine of at least one of these `generations` is there, by replica.
        """

    async def disconnect(self) -> None:
        """Disconnect before Triton is stopped, which would wait for open streams.

        Requests that run fail.
        """

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> Submission:
        """Send a request; `engine_inputs` are inputs that only this engine has.

        `put` gets items up to one that has an `end`; a gap in their offsets shows lost tokens. A
        request that gets nothing for the timeout ends with E2101. Raises E2105 while there is no
        connection.
        """


def failure(handle: int, error: CogTritonError | str) -> StepItem:
    """The item that ends a request with an error."""
    return StepItem(handle, 0, 0, [], [], ERROR, str(error))
