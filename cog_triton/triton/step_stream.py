"""Token transport over the step stream: one response of Triton a step has the tokens of all.

One long request to the private model ``engine_steps`` brings the steps; each request is an ordinary
one to that model, which names the stream and is answered once, at its end. See `step_session`.

Several engines of one model have a step stream each. The choice of one is made here, where the load
of all requests and the fate of each are known, so that an engine's death ends one stream and its
requests alone.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cog_triton.engines.engine_client import TOKENS_A_REQUEST, ReplicaChoice
from cog_triton.engines.generate_stream import STEP_MODEL, ToError
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import TritonUnavailable
from cog_triton.triton.step_session import (
    StepLoad,
    StepSession,
    StepStatistics,
    StepSubmission,
)
from cog_triton.triton.token_transport import Put
from cog_triton.triton.triton_connections import Exchange, Receiver, TritonConnections

_GENERATE = f"/v2/models/{STEP_MODEL}/generate"
_REOPEN_S = 1.0


class StepStream:
    """Front end's side of a step stream, which is opened again when it breaks.

    See `TokenTransport`.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        to_error: ToError,
        encode_request: Callable[[EngineRequest], dict[str, Any]],
        replica: int = 0,
    ) -> None:
        """`timeout` is in seconds between tokens of a request; `replica` is one of the engines."""
        self._replica = replica
        self._timeout = timeout
        self._to_error = to_error
        self._encode_request = encode_request
        self._connections = TritonConnections(url, self._on_tick)
        self._lock = threading.Lock()
        self._session: StepSession | None = None
        self._wanted = False
        self._reopen_at = 0.0
        self.statistics = StepStatistics()

    @property
    def last_token_at(self) -> float:
        """See `TokenTransport.last_token_at`."""
        return self.statistics.last_token_at

    @property
    def load(self) -> StepLoad | None:
        """What its engine has to do for us; None while it takes no requests."""
        session = self._session
        if session is None or session.closed or not session.ready.is_set():
            return None
        return session.load

    def open(self) -> None:
        """See `TokenTransport.open`; waits until the engine's process is connected, too."""
        session = self.begin_to_open()
        session.ready.wait()
        if session.error is not None:
            raise session.error
        self._wanted = True

    def begin_to_open(self) -> StepSession:
        """Connect, without waiting for the engine's process."""
        with self._lock:
            session = self._session
            if session is None or session.closed:
                session = self._session = self._new_session()
        return session

    def keep_open(self) -> None:
        """Open it, and again whenever it breaks, without waiting."""
        self._wanted = True
        with suppress(TritonUnavailable):  # it is tried again
            self.begin_to_open()

    def disconnect(self) -> None:
        """See `TokenTransport.disconnect`."""
        with self._lock:
            self._wanted = False
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """See `TokenTransport.close`."""
        self.disconnect()
        self._connections.close()

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> StepSubmission:
        """See `TokenTransport.submit`."""
        session = self._session
        if session is None or session.closed:
            self._reopen()  # waits for the reader, if that does it already
            session = self._session
        if session is None or session.closed:
            raise TritonUnavailable("the connection to the engine is being opened; try again")
        values = {**self._encode_request(request), **engine_inputs}
        # As text: JSON of 100,000 ids takes Triton milliseconds, in which it sends no step.
        ids = array("i", values.pop("input_ids"))
        values["packed_input_ids"] = base64.b64encode(ids.tobytes()).decode()
        del values["input_lengths"]
        return session.submit(values, put, len(ids))

    def _new_session(self) -> StepSession:
        return StepSession(
            self._send,
            self._to_error,
            self._timeout,
            self.statistics,
            self._reopen,
            replica=self._replica,
        )

    def _send(self, values: Mapping[str, Any], receiver: Receiver, streams: bool) -> Exchange:
        path = f"{_GENERATE}_stream" if streams else _GENERATE
        body = json.dumps(values).encode()
        return self._connections.send(path, body, receiver, keep=not streams)

    def _on_tick(self, now: float) -> None:
        session = self._session
        if session is not None and not session.closed:
            session.on_tick(now)
        else:
            self._reopen()

    def _reopen(self) -> None:
        """Open the stream again if it broke, at most once a second."""
        now = time.monotonic()
        with self._lock:
            session = self._session
            if self._wanted and now >= self._reopen_at and (session is None or session.closed):
                self._reopen_at = now + _REOPEN_S
                try:
                    self._session = self._new_session()
                except TritonUnavailable:
                    self._session = None


_POLL_S = 0.02
_OPENING_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """Statistics of all streams, read as `StepStatistics` of one."""

    streams: Sequence[StepStatistics]

    @property
    def last_token_at(self) -> float:
        """When any of them last brought something."""
        return max(stream.last_token_at for stream in self.streams)

    @property
    def lost_steps(self) -> int:
        """Steps that were lost on any of them."""
        return sum(stream.lost_steps for stream in self.streams)

    @property
    def lag(self) -> int:
        """Steps in the last read of the one that brought most."""
        return max(stream.lag for stream in self.streams)


class ReplicaStreams:
    """Step streams of all engines, each opened again when it breaks; see `TokenTransport`."""

    def __init__(
        self,
        count: int,
        url: str,
        timeout: float,
        to_error: ToError,
        encode_request: Callable[[EngineRequest], dict[str, Any]],
    ) -> None:
        """`timeout` is in seconds between tokens of a request."""
        self._choice = ReplicaChoice()
        self._streams = [
            StepStream(url, timeout, to_error, encode_request, replica) for replica in range(count)
        ]
        self.statistics = ReplicaStatistics([stream.statistics for stream in self._streams])

    @property
    def last_token_at(self) -> float:
        """See `TokenTransport.last_token_at`."""
        return self.statistics.last_token_at

    @property
    def serving(self) -> Mapping[int, StepStream]:
        """The streams of engines that take requests, by replica."""
        streams = enumerate(self._streams)
        return {replica: stream for replica, stream in streams if stream.load is not None}

    def open(self) -> None:
        """See `TokenTransport.open`; waits until one of the engines is connected."""
        deadline = time.monotonic() + _OPENING_S
        for stream in self._streams:
            stream.keep_open()
        while not self.serving:
            if time.monotonic() > deadline:
                raise TritonUnavailable(f"no engine was connected within {_OPENING_S:g} s")
            time.sleep(_POLL_S)

    def disconnect(self) -> None:
        """See `TokenTransport.disconnect`."""
        for stream in self._streams:
            stream.disconnect()

    def close(self) -> None:
        """See `TokenTransport.close`."""
        for stream in self._streams:
            stream.close()

    def submit(
        self, request: EngineRequest, engine_inputs: Mapping[str, Any], put: Put
    ) -> StepSubmission:
        """See `TokenTransport.submit`; the request goes to an engine that is there."""
        loads = {
            replica: load.requests + load.waiting_tokens / TOKENS_A_REQUEST
            for replica, stream in enumerate(self._streams)
            if (load := stream.load) is not None
        }
        if not loads:
            raise TritonUnavailable("no engine is there; try again")
        chosen = self._choice.choose(request.input_ids, loads, request.adapter)
        return self._streams[chosen].submit(request, engine_inputs, put)

    def forget(self, replica: int) -> None:
        """Take an engine that has died for one without prompts in its cache."""
        self._choice.forget(replica)
