"""Triton model ``engine_steps``: one response for each engine step, for all requests of a client.

Private to our front end: it opens a stream, one long request under a secret name, and names it in
requests that are answered once, at their end. See docs/architecture.md.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.request_metrics import RequestMetrics
from cog_triton.backend.step_channel import StepChannel, response
from cog_triton.backend.step_sender import split
from cog_triton.engines import step_numbering as wire
from cog_triton.engines import tensor_contract
from cog_triton.engines.base import EngineStats
from cog_triton.engines.engine_client import EngineClient, guest_connectors
from cog_triton.engines.engine_link import engine_gone
from cog_triton.engines.request import EXTRAS, EngineRequest, decode_extras
from cog_triton.engines.step_items import EncodedStep
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnavailable, nearest
from cog_triton.keeper.engine_lease import replica_count
from cog_triton.system import process_tuning

DecodeRequest = Callable[[Mapping[str, npt.NDArray[Any]]], EngineRequest]
Tensors = dict[str, npt.NDArray[Any]]
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_TICK_S = 0.1
_NAME = re.compile(r"[0-9a-f]{32}")
_HANDLE_BITS = wire.MAX_HANDLE.bit_length()


class StepModel:
    """Base of the generated ``TritonPythonModel``; `make_step_model` sets `decode_request`.

    One lock guards all streams: steps, commands and the ticker take turns.
    """

    decode_request: DecodeRequest

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start to connect to the engine process that ``tensorrt_llm`` has leased."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        self._max_ticks = parameters.positive_int("ack_timeout_ms") // 100 or 1
        self._input_names = [item["name"] for item in json.loads(args["model_config"])["input"]]
        self._epoch = time.time_ns() // 1000
        self._lock = threading.Lock()
        self._streams: dict[str, StepChannel] = {}
        self._by_number: dict[int, StepChannel] = {}
        self._stream_count = 0
        self._commands = {
            wire.STOP: self._stop,
            wire.ACK: self._acknowledge,
            wire.CLOSE: self._close,
        }
        self._replicas = replica_count()
        self._engines = EngineClient(
            guest_connectors(),
            "steps",
            on_open=self._on_open,
            on_step=self._on_step,
            on_death=self._on_death,
        )
        self._metrics = RequestMetrics(args, self._stats)
        self._closing = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()
        self._engines.start()
        process_tuning.tune_for_serving()

    def execute(self, requests: list[Any]) -> None:
        """Carry out commands; all but ``open`` and ``submit`` are answered at once."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensor_contract.check_parameters(
                    python_backend.request_parameters(request), self._input_names
                )
                tensors = python_backend.input_tensors(request)
                with self._lock:
                    self._execute(tensors, sender)
            except CogTritonError as error:
                sender.send(python_backend.error_response(error), flags=_FINAL)

    def finalize(self) -> None:
        """Stop all threads; Triton has ended all requests before."""
        self._closing.set()
        self._ticker.join()
        self._engines.close()
        self._metrics.close()

    def _execute(self, tensors: Tensors, sender: Any) -> None:
        command, name = _text(wire.COMMAND, tensors), _text(wire.STREAM, tensors)
        if command == wire.OPEN:
            replica = _number(wire.REPLICA, tensors) if wire.REPLICA in tensors else 0
            self._open(name, replica, sender)
            return
        known = (wire.OPEN, wire.SUBMIT, wire.RESEND, *self._commands)
        if command not in known:
            raise InvalidArgument(
                f"step_command={command[:40]!r}: must be one of {', '.join(known)}"
                f"{nearest(command, list(known))}"
            )
        stream = self._streams.get(name)
        if stream is None:
            raise TritonUnavailable("there is no such step stream; open one and try again")
        if command == wire.SUBMIT:
            self._submit(stream, tensors, sender)
        elif command == wire.RESEND:
            stream.resend(_number(wire.NUMBER, tensors), sender)
        else:
            self._commands[command](stream, tensors)
            # Triton's generate wants exactly one response.
            python_backend.send(sender, response({wire.NUMBER: stream.last_number}), _FINAL)

    def _open(self, name: str, replica: int, sender: Any) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidArgument("step_stream: must be 32 hexadecimal digits")
        if name in self._streams:
            raise InvalidArgument("step_stream: a stream of this name is open")
        if not 0 <= replica < self._replicas:
            raise InvalidArgument(
                f"step_replica={replica}: must be less than {self._replicas}, all engines"
            )
        number, self._stream_count = self._stream_count, self._stream_count + 1
        stream = StepChannel(name, number, replica, self._epoch, sender)
        self._streams[name] = self._by_number[number] = stream
        if self._is_open(stream):
            stream.heartbeat()

    def _submit(self, stream: StepChannel, tensors: Tensors, sender: Any) -> None:
        handle = _number(wire.HANDLE, tensors)
        if not 0 <= handle <= wire.MAX_HANDLE:
            raise InvalidArgument(f"step_handle={handle}: must be from 0 to {wire.MAX_HANDLE}")
        if stream.begin(handle, sender):
            return
        try:
            extras = _text(EXTRAS, tensors) if EXTRAS in tensors else None
            request = type(self).decode_request(_unpacked(tensors))
            if extras is not None:
                request = decode_extras(request, extras)
            number = stream.number << _HANDLE_BITS | handle
            self._engines.submit_to(stream.replica, number, request)
        except CogTritonError as error:
            stream.fail(handle, error)
        self._metrics.publish()

    def _stop(self, stream: StepChannel, tensors: Tensors) -> None:
        handle = _number(wire.HANDLE, tensors)
        if stream.stop(handle):
            self._engines.cancel(stream.number << _HANDLE_BITS | handle)

    def _acknowledge(self, stream: StepChannel, tensors: Tensors) -> None:
        stream.acknowledge(_number(wire.NUMBER, tensors))

    def _close(self, stream: StepChannel, tensors: Tensors) -> None:
        self._leave(stream)

    def _leave(self, stream: StepChannel) -> None:
        """End a stream, and cancel its requests in the engine."""
        del self._streams[stream.name]
        stream.close()
        running = stream.running
        for handle in running:
            self._engines.cancel(stream.number << _HANDLE_BITS | handle)
        if not running:
            del self._by_number[stream.number]
            self._metrics.publish()

    def _on_open(self, replica: int) -> None:
        with self._lock:
            for stream in self._streams.values():
                if stream.replica == replica:
                    stream.heartbeat()
        self._metrics.publish()

    def _on_step(self, replica: int, step: EncodedStep) -> None:
        parts = split(step.items.tolist(), step.log_probs.tolist(), step.errors)
        ended = False
        with self._lock:
            for number, part in parts.items():
                stream = self._by_number.get(number)
                if stream is None:
                    continue
                stream.add(part)
                if part.ended:
                    ended = True
                    if stream.name not in self._streams and not stream.running:
                        del self._by_number[number]
        if ended:
            self._metrics.publish()

    def _on_death(self, replica: int) -> None:
        with self._lock:
            for stream in list(self._by_number.values()):
                if stream.replica == replica:
                    stream.end(engine_gone())
                    self._streams.pop(stream.name, None)
                    del self._by_number[stream.number]
        self._metrics.publish()

    def _tick(self) -> None:
        while not self._closing.wait(_TICK_S):
            with self._lock:
                for stream in list(self._streams.values()):
                    if not stream.tick(self._max_ticks, beats=self._is_open(stream)):
                        self._leave(stream)

    def _is_open(self, stream: StepChannel) -> bool:
        return stream.replica in self._engines.loads()

    def _stats(self) -> EngineStats:
        slots = self._engines.max_batch_size
        with self._lock:
            active = sum(len(stream.running) for stream in self._by_number.values())
        return EngineStats(active, max(0, active - slots), slots)


def make_step_model(
    decode_request: DecodeRequest = tensor_contract.decode_request,
) -> type[StepModel]:
    """Make the class that a rendered ``model.py`` exposes; see `make_token_model`."""
    return type("TritonPythonModel", (StepModel,), {"decode_request": staticmethod(decode_request)})


def _text(name: str, tensors: Tensors) -> str:
    if name not in tensors:
        raise InvalidArgument(f"{name}: missing; it is required")
    value = tensor_contract.scalar(name, tensors.pop(name))
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _number(name: str, tensors: Tensors) -> int:
    if name not in tensors:
        raise InvalidArgument(f"{name}: missing; it is required")
    return int(tensor_contract.scalar(name, tensors.pop(name)))


def _unpacked(tensors: Tensors) -> Tensors:
    """The contract's inputs, with `input_ids` from `packed_input_ids` where that is given."""
    if "packed_input_ids" not in tensors:
        return tensors
    try:
        raw = base64.b64decode(_text("packed_input_ids", tensors), validate=True)
        ids = np.frombuffer(raw, "<i4")
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"packed_input_ids: not base64 of int32: {error}") from error
    tensors["input_ids"] = ids[np.newaxis]
    tensors["input_lengths"] = np.array([[ids.size]], np.int32)
    return tensors
