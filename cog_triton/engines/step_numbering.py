"""Format of the step stream: heads and commands, and the receiving end's account of steps.

A response of the private model ``engine_steps`` is a head and the items of one step
(`cog_triton.engines.step_items`). Steps are numbered from 1, kept until they are acknowledged
(`cog_triton.backend.step_sender`), and sent again when one is missing. So each is dealt out once,
in order, or is known to be lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cog_triton.errors import TritonMalformedEvent

STREAM, COMMAND, REPLICA = "step_stream", "step_command", "step_replica"
HANDLE, NUMBER = "step_handle", "step_number"
"""Inputs: names of a stream and of a command, of an engine, a request, a step."""
STEP, LOG_PROBS, ERRORS = "step", "log_probs", "step_errors"
"""Outputs of a step; those of an answer are `NUMBER` and the contract's."""
OPEN, SUBMIT, STOP, ACK, RESEND, CLOSE = "open", "submit", "stop", "ack", "resend", "close"
"""Commands."""

HEARTBEAT, RESENT = 1, 2
"""Flags of a head."""
MAX_HANDLE = (1 << 40) - 1
"""Largest handle of a request on a stream."""
_ACK_STEPS = 64
_ASK_AGAIN_S = 0.5


class Head(NamedTuple):
    """What is before the items: the sender's epoch, the step's number, flags, number of items.

    A heartbeat has the number of the last step, and no items.
    """

    epoch: int
    number: int
    flags: int = 0
    items: int = 0


HEAD = len(Head._fields)


def read_head(step: Any) -> Head:
    """The head of a response's output `STEP`; raises E2104."""
    if not isinstance(step, list) or len(step) < HEAD:
        raise TritonMalformedEvent(f"no step: {str(step)[:200]}")
    return Head(*step[:HEAD])


class StepAccount:
    """Receiving end of a step stream: which steps were dealt out, are missing, or acknowledged.

    Without a connection and without a clock: `now` is in seconds. What `take` and `acknowledgement`
    ask for is to be sent; what becomes of it is told by `resent_from` and `acknowledged`.
    """

    def __init__(self) -> None:
        self.last = 0
        """Number of the last step that was dealt out."""
        self.missing: int | None = None
        """Number from which steps are to be sent again, once; None while none is to be asked."""
        self._acknowledged = 0
        self._asked_at: float | None = None
        self._ack_at: float | None = None

    def take(self, head: Head, now: float) -> bool:
        """Whether a step is the next one, to be dealt out now; others are known, or too early."""
        number = head.number
        if head.flags & HEARTBEAT:
            if number > self.last:
                self._miss(now)
            return False
        if number > self.last + 1:
            self._miss(now)
        if number != self.last + 1:
            return False
        self.last = number
        self._asked_at = None
        return True

    def resent_from(self, first: int) -> int:
        """Go on at the step that is sent first again; returns how many before it are lost.

        The items' offsets tell who has lost any.
        """
        lost = max(0, first - self.last - 1)
        if lost:
            self.last = first - 1
            self._asked_at = None
        return lost

    def is_ack_due(self) -> bool:
        """Whether so many steps are not acknowledged that it should not wait for a tick."""
        return self.last - self._acknowledged >= _ACK_STEPS

    def acknowledgement(self, now: float) -> int | None:
        """Number to acknowledge; None if that was done, or is under way."""
        if self.last == self._acknowledged:
            return None
        if self._ack_at is not None and now - self._ack_at <= _ASK_AGAIN_S:
            return None
        self._ack_at = now
        return self.last

    def acknowledged(self, number: int | None) -> None:
        """Take the answer to an acknowledgement; None if there was none."""
        self._ack_at = None
        if number is not None:
            self._acknowledged = max(number, self._acknowledged)

    def _miss(self, now: float) -> None:
        if self._asked_at is None or now - self._asked_at > _ASK_AGAIN_S:
            self._asked_at = now
            self.missing = self.last + 1
