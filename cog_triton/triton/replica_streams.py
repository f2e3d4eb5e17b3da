"""Token transport to several engines of one model: a step stream each, and the choice of one.

The choice is made here, where the load of all requests and the fate of each are known, so that
an engine's death ends one stream and its requests alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cog_triton.engines.generate_stream import ToError
from cog_triton.engines.replica_choice import TOKENS_A_REQUEST, ReplicaChoice
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import TritonUnavailable
from cog_triton.triton.step_session import StepStatistics, StepSubmission
from cog_triton.triton.step_stream import StepStream
from cog_triton.triton.token_transport import Put

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
