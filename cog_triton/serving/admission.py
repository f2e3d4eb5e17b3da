"""Admission control: concurrency limit plus a bounded FIFO queue; rejects while unhealthy."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cog_triton.errors import CogTritonError, Overloaded, TritonUnavailable
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
        self._admitted = threading.Event()
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

    @contextmanager
    def slot(self, ticket: Ticket) -> Iterator[None]:
        """Wait for a slot, and hold it for the duration of the context.

        Raises E2107 when the queue is full, the error of `reject_new` or `close`, and E2105
        when the ticket was cancelled while it was queued.
        """
        self._acquire(ticket)
        try:
            yield
        finally:
            self._release(ticket)

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

    def _acquire(self, ticket: Ticket) -> None:
        arrived = time.perf_counter()
        with self._changed:
            if self._rejection is not None:
                raise copy.copy(self._rejection)
            if len(self._running) < self.slots:
                self._running.add(ticket)
                ticket.queue_time = 0.0
                return
            if len(self._queue) >= self.max_queue:
                raise Overloaded(
                    f"{self.running} predictions run and {self.waiting} wait, no more than"
                    f" {self.max_queue} may (MAX_QUEUE); try again later"
                )
            self._queue.append(ticket)
        ticket.on_end(lambda: self._remove_from_queue(ticket))
        ticket._admitted.wait()
        if ticket.ended:
            self._release(ticket)
            ticket.raise_error()
            raise TritonUnavailable("cancelled while it waited for its turn")
        ticket.queue_time = time.perf_counter() - arrived

    def _release(self, ticket: Ticket) -> None:
        with self._changed:
            self._running.discard(ticket)
            while self._queue and len(self._running) < self.slots:
                next_ticket = self._queue.popleft()
                self._running.add(next_ticket)
                next_ticket._admitted.set()
            self._changed.notify_all()

    def _remove_from_queue(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._changed.notify_all()
        ticket._admitted.set()


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
            " some of them itself; set it to %d or more",
            cog_limit,
            slots,
            queue,
            needed,
        )
    return Admission(slots, queue)
