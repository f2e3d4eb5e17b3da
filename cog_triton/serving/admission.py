"""Admission control: concurrency limit plus a bounded FIFO queue; rejects while unhealthy."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from cog_triton.errors import CogTritonError, Overloaded
from cog_triton.serving.coglet.slot_limit import MAX_SLOTS
from cog_triton.settings import Settings

_log = logging.getLogger(__name__)

DEFAULT_MAX_QUEUE = 64


class Ticket:
    """One request in admission control; any thread may cancel or fail it at any time."""

    def __init__(self) -> None:
        self.cancelled = False
        """Whether its client has cancelled it or disconnected."""
        self.error: CogTritonError | None = None
        """The error that it was failed with, if any."""
        self.queue_time: float | None = None
        """Seconds from arrival to admission; None until it is admitted."""
        self._arrived = 0.0
        self._on_turn: Callable[[], None] = lambda: None
        self._stop: Callable[[], None] = lambda: None

    @property
    def ended(self) -> bool:
        """Whether `cancel` or `fail` was called."""
        return self.cancelled or self.error is not None

    def cancel(self) -> None:
        """End the request on behalf of its client."""
        self.cancelled = True
        self._stop()

    def fail(self, error: CogTritonError) -> None:
        """End the request with the error that its client gets; the first error wins."""
        self.error = self.error or error
        self._stop()

    def raise_error(self) -> None:
        """Raise the error given to `fail`, if any."""
        if self.error is not None:
            raise copy.copy(self.error)  # one error ends many requests, each on its own thread

    def on_end(self, stop: Callable[[], None]) -> None:
        """Set the callback that `cancel` and `fail` call; called at once if it has ended already.

        It may be called twice.
        """
        self._stop = stop
        if self.ended:
            stop()


class Admission:
    """Concurrency limit of `slots` requests; up to `max_queue` more wait in FIFO order."""

    def __init__(self, slots: int, max_queue: float = math.inf) -> None:
        self.slots = slots
        self.max_queue = max_queue
        self._running: set[Ticket] = set()
        self._queue: deque[Ticket] = deque()
        self._rejection: CogTritonError | None = None
        self._changed = threading.Condition()

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    def enter(self, ticket: Ticket, on_turn: Callable[[], None]) -> None:
        """Ask for a slot, without waiting: the ticket has a `queue_time` once it holds one.

        `on_turn` is called, on any thread, if that comes later. Raises E2107 when the queue is
        full, or the error of `reject_new` or `close`. `leave` must follow.
        """
        with self._changed:
            if self._rejection is not None:
                raise copy.copy(self._rejection)
            if len(self._running) < self.slots:
                self._running.add(ticket)
                ticket.queue_time = 0.0
                return
            if len(self._queue) >= self.max_queue:
                raise self._overloaded()
            ticket._arrived = time.perf_counter()
            ticket._on_turn = on_turn
            self._queue.append(ticket)

    def require_room(self, count: int) -> None:
        """Raise E2107 unless `count` requests have room now, to run or to wait.

        So that none of a group is begun when others of it would be rejected.
        """
        with self._changed:
            if self.running + self.waiting + count > self.slots + self.max_queue:
                raise self._overloaded()

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"{self.running} predictions run and {self.waiting} wait, no more than"
            f" {self.max_queue} may (MAX_QUEUE); try again later"
        )

    def leave(self, ticket: Ticket) -> None:
        """Give the slot, or the place in the queue, back; a ticket without one is no error."""
        admitted: list[Ticket] = []
        with self._changed:
            self._running.discard(ticket)
            if ticket in self._queue:
                self._queue.remove(ticket)
            while self._queue and len(self._running) < self.slots:
                next_ticket = self._queue.popleft()
                self._running.add(next_ticket)
                next_ticket.queue_time = time.perf_counter() - next_ticket._arrived
                admitted.append(next_ticket)
            self._changed.notify_all()
        for next_ticket in admitted:
            next_ticket._on_turn()

    def reject_new(self, error: CogTritonError) -> None:
        """Reject new requests with `error`; running and queued ones continue."""
        with self._changed:
            self._rejection = error

    def close(self, error: CogTritonError) -> None:
        """Reject new requests, and fail all running and queued ones with `error`."""
        with self._changed:
            self._rejection = error
            tickets = [*self._queue, *self._running]
        for ticket in tickets:
            ticket.fail(error)

    def open(self) -> None:
        """Accept requests again."""
        with self._changed:
            self._rejection = None

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or is queued; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._running or self._queue), timeout)


def admission_for(settings: Settings, max_batch_size: int) -> Admission:
    """Admission control with the engine's batch size as limit, and a queue that Cog has room for.

    MAX_CONCURRENCY and MAX_QUEUE override both. Cog itself refuses requests beyond
    COG_MAX_CONCURRENCY; those that are rejected here with E2107 briefly count there, too.
    """
    slots = settings.max_concurrency or max_batch_size
    cog_limit = settings.cog_max_concurrency
    queue = settings.max_queue
    if queue is None:
        queue = min(DEFAULT_MAX_QUEUE, max(0, cog_limit * 3 // 4 - slots))
    needed = math.ceil((slots + queue) * 4 / 3)
    if cog_limit < needed:
        _log.warning(
            "COG_MAX_CONCURRENCY=%d: with %d predictions at once and a queue of %d, Cog refuses"
            " some of them itself; it should be %d or more, and can be %d",
            cog_limit,
            slots,
            queue,
            needed,
            MAX_SLOTS,
        )
    return Admission(slots, queue)
