"""Token transport of engines in processes of ours: one response of Triton for each engine step.

Each engine is behind a request to the private model ``engine_steps``, all on one gRPC
stream; see `cog_triton.engines.step_pipe`. Of several engines of one model, the choice is made
here, where the load of all requests and the fate of each are known. An engine's death ends its own
requests only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from cog_triton.engines import engine_messages, step_pipe
from cog_triton.engines.engine_client import TOKENS_A_REQUEST, ReplicaChoice
from cog_triton.engines.engine_messages import Cancel, Others, Welcome
from cog_triton.engines.generate_stream import STEP_MODEL
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import EncodedStep, decode
from cog_triton.errors import CogTritonError, TritonMalformedEvent, TritonUnavailable
from cog_triton.ipc.framing import FrameDecoder, FrameError, frame
from cog_triton.triton.infer_stream import (
    InferStream,
    Put,
    Tensor,
    ToError,
    failure,
    infer_request,
    timed_out,
)

_log = logging.getLogger(__name__)

_REOPEN_S = 1.0
_OPENING_S, _OPENING_LOOK_S = 60.0, 0.005
_DEATH_S = 5.0

MakeRequest = Callable[[EngineRequest, Mapping[str, Any]], EngineRequest]


class StepSubmission:
    """A running request at `replica`; `prompt` counts its prompt's tokens."""

    __slots__ = ("_engine", "handle", "last_at", "prompt", "put", "replica", "waits")

    def __init__(self, engine: EngineChannel, handle: int, put: Put, prompt: int) -> None:
        self._engine = engine
        self.replica = engine.replica
        self.handle = handle
        self.put = put
        self.prompt = prompt
        self.last_at = time.monotonic()
        self.waits = True
        """Whether it has got nothing yet."""

    def cancel(self) -> None:
        """See `Submission.cancel`."""
        self._engine.cancel(self)


class EngineChannel:
    """The way to one engine: `Receiver` of its requests; a `TokenTransport` for probes."""

    def __init__(self, streams: StepStreams, replica: int) -> None:
        self.replica = replica
        self._streams = streams
        self._stream = streams.stream
        self._name = ""
        self.running: dict[int, StepSubmission] = {}
        self.serves = False
        """Whether it takes requests."""
        self.generation = 0
        """Which of the engines at its address it was connected with last."""
        self.error: CogTritonError | None = None
        self.reopen_at = 0.0
        self.last_token_at = 0.0
        self.lag = self.lost = 0
        self.others_until = self.ended_at = -math.inf
        self._start()

    def _start(self) -> None:
        self._decoder, self._order = FrameDecoder(), step_pipe.InOrder()
        self._responses = self._told = self._unread = 0
        self._waiting: list[tuple[int, bytes]] = []  # for the engine

    @property
    def load(self) -> float:
        """What its engine has to do, in requests: those that run, and tokens of waiting prompts."""
        running = list(self.running.values())
        waiting = sum(one.prompt for one in running if one.waits)
        return len(running) + waiting / TOKENS_A_REQUEST

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> StepSubmission:
        if not self._name:
            raise TritonUnavailable("the connection to the engine has ended; try again")
        submission = StepSubmission(self, next(self._streams.handles), put, len(request.input_ids))
        made = self._streams.make_request(request, engine_inputs)
        content = engine_messages.submit(submission.handle, made)
        self.running[submission.handle] = submission
        if self.serves:
            self._send(content)
        else:
            self._waiting.append((submission.handle, content))
        return submission

    def cancel(self, submission: StepSubmission) -> None:
        """Stop a request, if it runs, on behalf of its caller."""
        if self.running.pop(submission.handle, None) is not None:
            self._send(engine_messages.encode(Cancel(submission.handle)))

    def open(self) -> None:
        """Open it, unless it is open."""
        if self._name or not self._stream.connected:
            return
        self._name, self.error = f"{secrets.token_hex(8)}-{self.replica}", None
        self._start()
        self._call(step_pipe.open_call(self.replica, self._streams.key()), self)

    def close(self) -> None:
        """End it, and what runs."""
        if self._name:
            self.on_failure(TritonUnavailable("the server is stopping; try again"))

    def check_timeouts(self, now: float, timeout: float) -> None:
        """Fail requests that got nothing for `timeout` seconds."""
        for submission in list(self.running.values()):
            if now - submission.last_at > timeout:
                self._fail(submission, timed_out(timeout))
                self._send(engine_messages.encode(Cancel(submission.handle)))

    def on_response(self, response: Any, last: bool) -> None:
        """See `Receiver.on_response`: some steps, or parts of a step."""
        if not response.raw_output_contents:
            if last:
                self.on_failure(TritonUnavailable("the engine's steps have ended; try again"))
            return
        content = response.raw_output_contents[0]
        self._responses += 1
        self._unread += len(content)
        try:
            in_order = self._order.take(content)
            payloads = [payload for part in in_order for payload in self._decoder.feed(part)]
            self.lag = len(payloads)
            for payload in payloads:
                self._take(engine_messages.decode(payload))
        except (FrameError, TritonMalformedEvent) as error:
            self.close()
            _log.error("engine %d: %s", self.replica, error)
            return
        due = self._responses - self._told >= step_pipe.ACK_RESPONSES
        if due or self._unread >= step_pipe.ACK_BYTES:
            self._told, self._unread = self._responses, 0
            self._call(step_pipe.arrived_call(self._responses))

    def on_failure(self, error: CogTritonError) -> None:
        """See `Receiver.on_failure`: the engine has gone, or Triton."""
        self._call(step_pipe.CLOSE)  # it may be a single call that has failed
        self._stream.forget(self._name)
        self.serves, self._name = False, ""
        self.ended_at = time.monotonic()
        if self.others_until == math.inf:
            self.others_until = time.monotonic()
        if self.running:
            self.lost += 1
        if not isinstance(error, TritonUnavailable):
            error = TritonUnavailable(f"the engine's steps have ended: {error}")
        self.error = error
        for submission in list(self.running.values()):
            self._fail(submission, error)
        self._streams.reopen(self, time.monotonic())

    def _take(self, message: Any) -> None:
        if isinstance(message, EncodedStep):
            now = self.last_token_at = time.monotonic()
            running = self.running
            floats = message.log_probs.tolist()
            for item in decode(message.items.tolist(), floats, message.errors):
                submission = running.get(item.handle)
                if submission is not None:
                    submission.last_at, submission.waits = now, False
                    if item.end:
                        running.pop(item.handle, None)
                    submission.put(item)
        elif isinstance(message, Others):
            self.others_until = math.inf if message.run else time.monotonic()
        elif isinstance(message, Welcome):
            self.serves, self.generation, self.error = True, message.generation, None
            waiting, self._waiting = self._waiting, []
            for handle, content in waiting:
                if handle in self.running:  # else it was cancelled meanwhile
                    self._send(content)

    def _fail(self, submission: StepSubmission, error: CogTritonError) -> None:
        if self.running.pop(submission.handle, None) is not None:
            submission.put(failure(submission.handle, error))

    def _send(self, content: bytes) -> None:
        if self._name:
            self._call(step_pipe.SEND + frame(content))

    def _call(self, call: bytes, receiver: EngineChannel | None = None) -> None:
        tensor = Tensor("UINT8", (len(call),), call)
        request = infer_request(STEP_MODEL, self._name, {step_pipe.CALL: tensor}, ends=False)
        self._stream.send(self._name, request, receiver)


class StepStreams:
    """Channels to all engines, each opened again when it breaks; see `TokenTransport`."""

    def __init__(
        self,
        target: Callable[[], str],
        key: Callable[[], str],
        timeout: float,
        to_error: ToError,
        make_request: MakeRequest,
        count: int = 1,
    ) -> None:
        """`timeout` is in seconds between tokens of a request.

        `target` is Triton's gRPC address, `key` the secret of its model ``engine_steps``;
        `make_request` makes the engine's own request; `count` is the number of engines.
        """
        self.key = key
        self.make_request = make_request
        self.handles = itertools.count(1)
        self._timeout = timeout
        self._choice = ReplicaChoice()
        self._reopening_at = 0.0
        self.stream = InferStream(target, to_error, self._on_tick)
        self._engines = [EngineChannel(self, replica) for replica in range(count)]

    @property
    def last_token_at(self) -> float:
        return max(engine.last_token_at for engine in self._engines)

    @property
    def lag(self) -> int:
        """Steps in the last response of the engine that brought most."""
        return max(engine.lag for engine in self._engines)

    @property
    def lost_steps(self) -> int:
        """How often an engine's steps ended while requests ran: the last ones were lost."""
        return sum(engine.lost for engine in self._engines)

    @property
    def others_at(self) -> float:
        return max(engine.others_until for engine in self._engines)

    def has_ended(self, replica: int | None) -> bool:
        return time.monotonic() - self._engines[replica or 0].ended_at < _DEATH_S

    @property
    def serving(self) -> Mapping[int, EngineChannel]:
        """Engines that take requests, by number."""
        return {engine.replica: engine for engine in self._engines if engine.serves}

    def note_active(self, requests: int | None) -> None:
        """See `TokenTransport.note_active`; engines in processes of their own say more."""

    async def open(self, generations: Mapping[int, int]) -> None:
        """See `TokenTransport.open`; waits until an engine's process is connected, too."""
        self.stream.connect()
        self._open_all()
        deadline = time.monotonic() + _OPENING_S
        awaited = [(self._engines[replica], number) for replica, number in generations.items()]
        while not any(engine.serves and engine.generation >= number for engine, number in awaited):
            if time.monotonic() > deadline or not self.stream.wanted:
                said = next((engine.error for engine, _ in awaited if engine.error), "no answer")
                raise TritonUnavailable(f"no engine is connected after {_OPENING_S:g} s: {said}")
            for engine, number in awaited:
                if engine.error is not None and engine.generation >= number:
                    raise engine.error
            await asyncio.sleep(_OPENING_LOOK_S)

    async def disconnect(self) -> None:
        self.stream.wanted = False  # no engine is to be opened again
        for engine in self._engines:
            engine.close()
        await self.stream.disconnect()

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> StepSubmission:
        """See `TokenTransport.submit`; the request goes to an engine that is there."""
        chosen = 0
        if len(self._engines) > 1:
            loads = {replica: engine.load for replica, engine in self.serving.items()}
            if not loads:
                raise TritonUnavailable("no engine is there; try again")
            chosen = self._choice.choose(request.input_ids, loads, request.adapter)
        return self._engines[chosen].submit(request, engine_inputs, put)

    def forget(self, replica: int) -> None:
        """Take an engine that has died for one without prompts in its cache."""
        self._choice.forget(replica)

    def _open_all(self) -> None:
        for engine in self._engines:
            engine.open()

    def _on_tick(self, now: float) -> None:
        for engine in self._engines:
            engine.check_timeouts(now, self._timeout)
        if now >= self._reopening_at:
            self._reopening_at = now + _REOPEN_S
            self.stream.reconnect()
            self._open_all()

    def reopen(self, engine: EngineChannel, now: float) -> None:
        """Open the channel of an engine that has gone, at most once a second."""
        if self.stream.wanted and now >= engine.reopen_at:
            engine.reopen_at = now + _REOPEN_S
            self.stream.reconnect()
            engine.open()
