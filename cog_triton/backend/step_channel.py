"""Step stream in the stub: the long request that carries it, and the requests that named it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from cog_triton import errors
from cog_triton.backend import python_backend
from cog_triton.backend.step_sender import Ended, Part, Response, StepSender, part_of
from cog_triton.engines import step_items, tensor_contract
from cog_triton.engines.generate_stream import to_error
from cog_triton.engines.step_items import StepItem
from cog_triton.engines.step_numbering import ERRORS, LOG_PROBS, NUMBER, STEP

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_HEARTBEAT_S = 0.2  # looked at every 0.1 s, so 0.25 s on average
_MAX_EARLY_STOPS = 4096


class StepChannel:
    """One front end's step stream; its methods are called under the model's lock.

    `number` is the upper part of its requests' handles in the engine, which is `replica`.
    """

    def __init__(self, name: str, number: int, replica: int, epoch: int, sender: Any) -> None:
        self.name = name
        self.number = number
        self.replica = replica
        self._sender = sender
        self._open = True
        self._steps = StepSender(epoch, self._send, self._answer_end)
        self._senders: dict[int, Any] = {}  # of running requests, by handle
        self._early_stops: OrderedDict[int, None] = OrderedDict()
        self._last_sent = 0.0

    @property
    def running(self) -> list[int]:
        """Handles of unanswered requests."""
        return list(self._senders)

    def begin(self, handle: int, sender: Any) -> bool:
        """Add a request; returns whether a stop has overtaken it. Raises E1005 if it runs."""
        if handle in self._senders:
            raise errors.InvalidArgument(f"step_handle={handle}: such a request is running")
        self._senders[handle] = sender
        if handle not in self._early_stops:
            return False
        del self._early_stops[handle]
        self.add(part_of([StepItem(handle, 0, 0, [], [], step_items.CANCELLED)]))
        return True

    def stop(self, handle: int) -> bool:
        """Whether a request runs that is to be cancelled; else the stop is remembered."""
        if handle in self._senders:
            return True
        self._early_stops[handle] = None
        if len(self._early_stops) > _MAX_EARLY_STOPS:
            self._early_stops.popitem(last=False)
        return False

    def fail(self, handle: int, error: errors.CogTritonError) -> None:
        """End a request with an error: an item, and its answer."""
        self.add(part_of([StepItem(handle, 0, 0, [], [], step_items.ERROR, str(error))]))

    def end(self, error: errors.CogTritonError) -> None:
        """End all requests with an error, and then the long request."""
        text = str(error)
        ends = [StepItem(handle, 0, 0, [], [], step_items.ERROR, text) for handle in self._senders]
        if ends:
            self.add(part_of(ends))
        self.close()

    def add(self, part: Part) -> None:
        """Send what a step has for this stream; after the end, only answer requests."""
        if self._open:
            self._steps.add(part)
            return
        for ended in part.ended:
            self._answer_end(ended, 0)

    def acknowledge(self, number: int) -> None:
        """See `StepSender.acknowledge`."""
        self._steps.acknowledge(number)

    def resend(self, number: int, sender: Any) -> None:
        """Answer with the first step that is still kept, and send it and later ones again."""
        first = self._steps.first_kept(number)
        python_backend.send(sender, response({NUMBER: first}), _FINAL)
        self._steps.resend(first)

    @property
    def last_number(self) -> int:
        """Number of the last step that was sent."""
        return self._steps.last_number

    def heartbeat(self) -> None:
        """Send a heartbeat."""
        self._steps.heartbeat()

    def tick(self, max_ticks: int, *, beats: bool) -> bool:
        """Look after the stream, ten times a second; returns whether its front end is there.

        Its heart `beats` while its engine is there: then the front end sends requests.
        """
        if self._sender.is_cancelled() or self._steps.ticks_unacknowledged() >= max_ticks:
            return False
        if beats and time.monotonic() - self._last_sent >= _HEARTBEAT_S:
            self._steps.heartbeat()
        return True

    def close(self) -> None:
        """End the long request, and answer the requests whose end has not been sent."""
        if self._open:
            self._open = False
            self._steps.close()
            self._sender.send(flags=_FINAL)

    def _send(self, step: Response) -> None:
        if not self._open:
            return
        self._last_sent = time.monotonic()
        tensors = [pb_utils.Tensor(STEP, step.numbers[np.newaxis])]
        if step.log_probs.size:
            tensors.append(pb_utils.Tensor(LOG_PROBS, step.log_probs[np.newaxis]))
        if step.errors:
            texts = np.array([[text.encode() for text in step.errors]], np.object_)
            tensors.append(pb_utils.Tensor(ERRORS, texts))
        python_backend.send(self._sender, pb_utils.InferenceResponse(output_tensors=tensors))

    def _answer_end(self, ended: Ended, number: int) -> None:
        sender = self._senders.pop(ended.handle, None)
        if sender is None:
            return
        if ended.error is not None:
            answer = python_backend.error_response(to_error(ended.error))
            sender.send(answer, flags=_FINAL)
            return
        last = response(
            {
                tensor_contract.FINISH_REASON: step_items.FINISH_REASONS[ended.end],
                "output_token_count": ended.tokens,
                NUMBER: number,
            }
        )
        python_backend.send(sender, last, _FINAL)


def response(values: Mapping[str, str | int]) -> Any:
    """A response of single values."""
    return python_backend.response(
        {
            name: np.array([[value]], np.object_ if isinstance(value, str) else np.int64)
            for name, value in values.items()
        }
    )
