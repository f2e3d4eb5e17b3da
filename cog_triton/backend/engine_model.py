"""Base of the Triton models whose answers an engine makes: one loop for all of them.

A request becomes engine requests, one for each prompt. The engine's client brings their events on
a thread of its own, and they become responses there. One more thread looks for disconnected
clients.
"""

from __future__ import annotations

import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.answers import Part, joined
from cog_triton.backend.text_inputs import Tensors
from cog_triton.engines.base import COALESCE
from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_messages import Role
from cog_triton.engines.engine_spec import own_addresses
from cog_triton.errors import CogTritonError, InvalidArgument, TritonUnknownError

_log = logging.getLogger(__name__)

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client has sent, and the names of the outputs that it asks for."""

    inputs: Tensors
    parameters: Mapping[str, Any]
    outputs: Sequence[str]
    request_id: str


class EngineModel(ABC):
    """`execute` only submits requests, so they do not wait for each other.

    A subclass reads the tensors of a request, and its parts make those of the responses.
    """

    role: Role = "tokens"

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start; an exception ends tritonserver, with its text in the log."""
        triton_log.install()
        self.name = args["model_name"]
        self.parameters = python_backend.Parameters(args)
        self.decoupled = self.parameters.decoupled
        self._check_period = self.parameters.positive_int("cancellation_check_period_ms") / 1000
        self.active: set[_ClientRequest] = set()
        self.numbers = itertools.count(1)
        self.changed: Callable[[], object] = lambda: None
        """Called when a request was submitted, or has ended."""
        self.engine = self.connect()
        self.engine.start()
        self.setup(args)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def connect(self) -> Any:
        """The client of the engine, which is started then."""
        coalesce = self.parameters.flag(COALESCE, default="true")
        return EngineClient(own_addresses(), self.role, coalesce=coalesce)

    @abstractmethod
    def setup(self, args: Mapping[str, str]) -> None:
        """Prepare for requests; raises a coded error, which ends tritonserver."""

    def takes_long(self, inputs: Tensors) -> bool:
        """Whether `parse` may take so long that it must have a thread of its own."""
        return False

    @abstractmethod
    def parse(self, asked: Asked) -> Sequence[Part]:
        """The engine requests of a request, at least one; raises its coded error."""

    def failure(self, event: Any) -> Any:
        """The response to an event that ends a request without an answer; None for others."""
        return None if event.error is None else python_backend.error_response(event.error)

    def execute(self, requests: list[Any]) -> None:
        """Submit requests to the engine, whose events send the responses."""
        for request in requests:
            inputs = python_backend.input_tensors(request)
            if not self.takes_long(inputs):
                _ClientRequest(self, request, inputs).run()
                continue
            # Triton may reuse the request's memory when `execute` returns.
            copied = {name: tensor.copy() for name, tensor in inputs.items()}
            run = _ClientRequest(self, request, copied).run
            threading.Thread(target=run, name="request", daemon=True).start()

    def finalize(self) -> None:
        """Stop the engine's client and all threads; Triton has ended all requests before."""
        self._closing.set()
        self._watcher.join()
        self.engine.close()

    def _watch(self) -> None:
        while not self._closing.wait(self._check_period):
            for request in self.active.copy():
                request.cancel_if_disconnected()


class _ClientRequest:
    """One client's request, until its last response is sent."""

    def __init__(self, model: EngineModel, request: Any, inputs: Tensors) -> None:
        self._model = model
        self._sender = request.get_response_sender()
        self._asked = Asked(
            inputs,
            python_backend.request_parameters(request),
            list(request.requested_output_names()),
            request.request_id(),
        )
        self._line = triton_log.RequestLine(model.name, self._asked.request_id)
        self._all: Sequence[Part] = ()
        self._parts: dict[int, Part] = {}  # that have not ended, by handle
        self._whole: list[Tensors] = []  # of a model that answers once
        self._lock = threading.Lock()
        self._stopped = self._ended = False

    def run(self) -> None:
        with self._answering_errors():
            inputs = self._asked.inputs
            if "stop" in inputs and inputs["stop"].any():
                self._stop_others()
                return
            self._all = self._model.parse(self._asked)
            self._parts = {next(self._model.numbers): part for part in self._all}
            self._model.active.add(self)
            for handle, part in list(self._parts.items()):
                emit = partial(self._emit, handle)
                self._model.engine.submit(handle, part.request, emit, part.prompt)
            self._model.changed()

    @contextmanager
    def _answering_errors(self) -> Iterator[None]:
        try:
            yield
        except CogTritonError as error:
            # A name that outlived this block would be a reference cycle, and keep the prompt.
            self._fail(python_backend.error_response(error), error)
        except Exception:  # noqa: BLE001 - the client must have an answer
            _log.exception("a request failed")
            failed = TritonUnknownError("a text model failed; see Triton's log")
            self._fail(python_backend.error_response(failed), failed)

    def cancel(self) -> None:
        """Stop the engine; the request ends with what it has. May need to be repeated."""
        self._stopped = True
        for handle in list(self._parts):
            self._model.engine.cancel(handle)

    def cancel_if_disconnected(self) -> None:
        """Stop the engine if the client has disconnected, or has asked for that."""
        with self._lock:
            disconnected = not self._ended and self._sender.is_cancelled()
        if disconnected or self._stopped:
            self.cancel()

    def _stop_others(self) -> None:
        if not (own := self._asked.request_id):
            text = "stop=True: Trying to stop a request but request ID is not provided"
            raise InvalidArgument(text)
        for other in self._model.active.copy():
            if other._asked.request_id == own:
                other.cancel()
        if self._model.decoupled:
            self._sender.send(flags=_FINAL)
        else:
            self._sender.send(python_backend.response({}), flags=_FINAL)

    def _emit(self, handle: int, event: Any) -> None:
        """Answer an event, one at a time.

        Triton (24.10) mixes up the outputs of responses that are sent at once.
        """
        failure = None
        with self._answering_errors(), self._lock:
            part = self._parts.get(handle)
            if part is None:
                return
            if (failure := self._model.failure(event)) is None:
                self._answer(handle, part, event)
        if failure is not None:
            self._fail(failure, event.error or event.finish)

    def _answer(self, handle: int, part: Part, event: Any) -> None:
        responses = part.feed(event)
        self._line.arrived(part.tokens)
        ended = event.finish is not None
        if ended or part.finished:
            responses += part.finish()
            del self._parts[handle]
            if not ended:
                self._model.engine.cancel(handle)
        last = not self._parts
        if not self._model.decoupled:
            self._whole += responses
            responses = [joined(self._whole)] if last else []
        for place, tensors in enumerate(responses, 1):
            flags = _FINAL if last and place == len(responses) else 0
            python_backend.send(self._sender, python_backend.response(tensors), flags)
        if last:
            if not responses:
                self._sender.send(flags=_FINAL)
            self._end("cancelled" if self._stopped else part.outcome or event.finish)

    def _fail(self, failure: Any, outcome: CogTritonError | str) -> None:
        """Send the response that ends it, and stop what still runs of it."""
        with self._lock:
            if self._ended:
                return
            running, self._parts = self._parts, {}
            self._sender.send(failure, flags=_FINAL)
            self._end(outcome)
        for handle in running:
            self._model.engine.cancel(handle)

    def _end(self, outcome: CogTritonError | str | None) -> None:
        """The last response is sent: the sender must not be used after."""
        self._ended = True
        self._line.prompt_tokens = sum(part.prompt_tokens for part in self._all)
        self._line.ended(outcome)
        self._model.active.discard(self)
        self._model.changed()
