"""The admission of the engine: so many requests at once, a bounded queue, and closed in trouble."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cog_triton.errors import CogTritonError, Overloaded, TritonUnavailable
from cog_triton.settings import Settings

DEFAULT_MAX_QUEUE = 64


class Ticket:
    """One request on its way through the admission; may be ended from any thread, at any time."""

    def __init__(self) -> None:
        self.cancelled = False
        """Its client does not want it any more."""
        self.error: CogTritonError | None = None
        """Why it was ended here, if it was."""
        self.queue_time: float | None = None
        """Seconds from its arrival to its turn; None before its turn."""
        self._admitted = threading.Event()
        self._stop: Callable[[], None] = lambda: None

    @property
    def ended(self) -> bool:
        """Whether somebody has ended it, by `cancel` or `interrupt`."""
        return self.cancelled or self.error is not None

    def cancel(self) -> None:
        """End it, as its client wishes."""
        self.cancelled = True
        self._stop()

    def fail(self, error: CogTritonError) -> None:
        """End it, with the error that its client gets."""
        self.error = self.error or error
        self._stop()

    def raise_error(self) -> None:
        """Raise what it was interrupted with, if it was."""
        if self.error is not None:
            raise copy.copy(self.error)  # one error ends many requests, each on its own thread

    def on_end(self, stop: Callable[[], None]) -> None:
        """What ends it from now on; called at once if it has been ended, and maybe twice."""
        self._stop = stop
        if self.ended:
            stop()


class Admission:
    """Lets at most `slots` requests in; `queue` more wait, first come, first served."""

    def __init__(self, slots: int, max_queue: float = math.inf) -> None:
        self.slots = slots
        self.max_queue = max_queue
        self._running: set[Ticket] = set()
        self._queue: deque[Ticket] = deque()
        self._rejection: CogTritonError | None = None
        self._changed = threading.Condition()

    @property
    def running(self) -> int:
        """Requests that the engine has."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    @contextmanager
    def slot(self, ticket: Ticket) -> Iterator[None]:
        """Wait for the ticket's turn, and hold its slot meanwhile.

        Raises E2107 when the queue is full, the error of `refuse` or `close`, and E2105 when the
        ticket was cancelled while it waited.
        """
        self._acquire(ticket)
        try:
            yield
        finally:
            self._release(ticket)

    def reject_new(self, error: CogTritonError) -> None:
        """Let nobody in any more; who is inside or waits goes on."""
        with self._changed:
            self._rejection = error

    def close(self, error: CogTritonError) -> None:
        """Let nobody in any more, and end everything inside and in the queue with `error`."""
        with self._changed:
            self._rejection = error
            tickets = [*self._queue, *self._running]
        for ticket in tickets:
            ticket.fail(error)

    def open(self) -> None:
        """Let requests in again."""
        with self._changed:
            self._rejection = None

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until nobody is inside or waits; whether it is so."""
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
                following = self._queue.popleft()
                self._running.add(following)
                following._admitted.set()
            self._changed.notify_all()

    def _remove_from_queue(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._changed.notify_all()
        ticket._admitted.set()


def admission_for(settings: Settings, max_batch_size: int) -> Admission:
    """As many at once as the engine batches, unless set otherwise; a queue that Cog has room for.

    Cog answers 409, without a code, to what comes beyond COG_MAX_CONCURRENCY. Those that are
    refused here with E2107 need a place there for a moment, too.
    """
    slots = settings.max_concurrency or max_batch_size
    places = settings.cog_max_concurrency
    queue = settings.max_queue
    if queue is None:
        queue = min(DEFAULT_MAX_QUEUE, max(0, places * 3 // 4 - slots))
    needed = math.ceil((slots + queue) * 4 / 3)
    if places < needed:
        print(
            f"Warning: COG_MAX_CONCURRENCY={places}: with {slots} predictions at once and a queue"
            f" of {queue}, Cog answers some of them 409; set it to {needed} or more"
        )
    return Admission(slots, queue)
