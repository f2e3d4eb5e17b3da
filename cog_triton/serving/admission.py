"""Admission control: concurrency limit plus a bounded fair queue; rejects while unhealthy.

After a death of the engine, it also tells interrupted requests when to be sent again.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from cog_triton.errors import CogTritonError, FatalRequest, Overloaded
from cog_triton.serving.coglet.cog_server import MAX_SLOTS
from cog_triton.serving.fair_queue import FairQueue, Queued
from cog_triton.serving.resume_order import MAX_DEATHS, ResumeOrder, Stay
from cog_triton.serving.tenants import Tenant
from cog_triton.settings import Settings

_log = logging.getLogger(__name__)

_LEAST_QUEUE = 64
_QUEUED_BATCHES = 4


class Ticket(Queued):
    """One request in admission control; any thread may cancel or fail it at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = False
        """Whether its client has cancelled it or disconnected."""
        self.error: CogTritonError | None = None
        """The error that it was failed with, if any."""
        self.queue_time: float | None = None
        """Seconds from arrival to admission; None until it is admitted."""
        self.turn = False
        """Whether it may be sent to the engine, for the first time or again."""
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
    """Concurrency limit of `slots` requests; up to `max_queue` more wait, of each tenant.

    They have their turns as `FairQueue` says, in order of arrival where there are no tenants.

    With `resumes`, requests outlive the engine: they keep their slots and places while it is down,
    from `pause` to `open`, and go on before those in the queue.
    """

    def __init__(self, slots: int, max_queue: float = math.inf, *, resumes: bool = False) -> None:
        """`resumes` needs someone who calls `pause`, `release` and `open`."""
        self.slots = slots
        self.max_queue = max_queue
        self.resumes = resumes
        self._order = ResumeOrder()
        self._tickets: dict[Stay, Ticket] = {}
        self._numbers = itertools.count()
        self._paused = self._closed = False
        self._queue: FairQueue[Ticket] = FairQueue(slots)
        self._rejection: CogTritonError | None = None
        self._end: CogTritonError | None = None
        self._changed = threading.Condition()

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._queue.running)

    def tickets(self) -> Sequence[Ticket]:
        """The requests that hold a slot."""
        with self._changed:
            return tuple(self._queue.running)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._queue.waiting

    def enter(self, ticket: Ticket, on_turn: Callable[[], None]) -> None:
        """Ask for a slot, without waiting: the ticket has a `queue_time` once it holds one.

        `on_turn` is called, on any thread, if that comes later. Raises E2107 when the queue is
        full, or the error of `reject_new` or `close`. `leave` must follow.
        """
        with self._changed:
            if (rejection := self._end or self._rejection) is not None:
                raise copy.copy(rejection)
            ticket._on_turn = on_turn
            ticket.stay.number = next(self._numbers)
            self._require_room(1, ticket.tenant)
            self._queue.push(ticket)
            turns = self._admitted()
            if ticket in turns:
                turns.remove(ticket)
                ticket.queue_time = 0.0
        _tell(turns)

    def _admitted(self) -> list[Ticket]:
        """Those of the queue that get slots now."""
        turns: list[Ticket] = []
        while not (self._paused or self._order.holds) and (ticket := self._queue.pop()) is not None:
            ticket.queue_time = time.perf_counter() - ticket.arrived
            ticket.turn = True
            turns.append(ticket)
        return turns

    def require_room(self, count: int, tenant: Tenant | None = None) -> None:
        """Raise E2107 unless `count` requests of a tenant have room now, to run or to wait.

        So that none of a group is begun when others of it would be rejected.
        """
        with self._changed:
            self._require_room(count, tenant)

    def _require_room(self, count: int, tenant: Tenant | None) -> None:
        waiting = self._queue.waiting_of(tenant)
        if tenant is not None and (most := tenant.concurrent) is not None:
            running = self._queue.running_of(tenant)
            if running + waiting + count > most:
                error = Overloaded(
                    f"{running} requests of {tenant.name} run and {waiting} wait, no more than"
                    f" {most} may (concurrent of its key); try again later"
                )
                error.retry_after = self._queue.retry_after(tenant)
                raise error
        if self.running + waiting + count > self.slots + self.max_queue:
            error = Overloaded(
                f"{self.running} predictions run and {waiting} wait, no more than"
                f" {self.max_queue} may (MAX_QUEUE); try again later"
            )
            error.retry_after = self._queue.retry_after(tenant)
            raise error

    def leave(self, ticket: Ticket) -> None:
        """Give the slot, or the place in the queue, back; a ticket without one is no error."""
        with self._changed:
            self._queue.remove(ticket)
            if self._tickets.pop(ticket.stay, None):
                self._order.remove(ticket.stay)
            turns = self._next_turns()
            self._changed.notify_all()
        _tell(turns)

    def sent(self, ticket: Ticket) -> None:
        """A request is about to be sent to the engine."""
        ticket.turn = False
        ticket.stay.epoch = self._order.epoch
        ticket.stay.exposed = True

    def proven(self, ticket: Ticket) -> None:
        """The engine has made a token of a request since it was sent."""
        if ticket.stay not in self._tickets:  # never interrupted: nobody waits for it
            ticket.stay.exposed = ticket.stay.suspect = False
            ticket.stay.blamed = 0
            ticket.prefilled = True
            if not self._queue.awaits_prefill:
                return
        with self._changed:
            if ticket.stay in self._tickets:
                self._order.proven(ticket.stay)
            turns = self._next_turns()
        _tell(turns)

    def interrupt(self, ticket: Ticket) -> bool:
        """The engine was lost to a running request: whether it may wait for its return.

        Its `turn` comes when the engine was found well, or has been started again.
        """
        with self._changed:
            if not self.resumes or self._closed or ticket not in self._queue.running:
                return False
            self._tickets[ticket.stay] = ticket
            self._order.add(ticket.stay)
            turns = self._next_turns()
        _tell(turns)
        return True

    def release(self) -> None:
        """The engine is well: let those go on that were interrupted."""
        with self._changed:
            self._order.release()
            turns = self._next_turns()
        _tell(turns)

    def _next_turns(self) -> list[Ticket]:
        if self._paused:
            return []
        turns = [self._tickets[stay] for stay in self._order.next_turns()]
        for ticket in turns:
            ticket.turn = True
        return turns + self._admitted()

    def reject_new(self, error: CogTritonError) -> None:
        """Reject new requests with `error` for good; running and queued ones continue."""
        with self._changed:
            self._end = error

    @property
    def suspects(self) -> int:
        """Number of requests that the engine may die of now: sent, and without a token since."""
        with self._changed:
            return sum(ticket.stay.exposed for ticket in self._queue.running)

    def pause(self, error: CogTritonError, *, blame: bool = True) -> None:
        """The engine has died: reject new requests with `error`; running and queued ones wait.

        One that too many deaths are blamed on ends with E2108; without `blame`, this is none.
        """
        fatal: list[Ticket] = []
        with self._changed:
            self._rejection = error
            if not self._paused:
                self._paused, self._closed = True, False
                self._order.died((ticket.stay for ticket in self._queue.running), blame=blame)
                fatal = self._fatal()
        _condemn(fatal)

    def lose(self, replica: int, *, blame: bool = True) -> None:
        """One of several engines has died: what it had goes on at the others.

        For E2108 and `blame` see `pause`.
        """
        with self._changed:
            self._order.lost((ticket.stay for ticket in self._queue.running), replica, blame=blame)
            fatal = self._fatal()
            turns = self._next_turns()
        _condemn(fatal)
        _tell(turns)

    def _fatal(self) -> list[Ticket]:
        return [ticket for ticket in self._queue.running if ticket.stay.blamed >= MAX_DEATHS]

    def hold(self, *, interrupt: bool) -> bool:
        """The engine is about to be stopped as planned: newcomers wait for its return.

        False, and nothing changes, while requests run; with `interrupt` they are to wait, too, if
        they can.
        """
        with self._changed:
            if self._queue.running and not (interrupt and self.resumes):
                return False
            self._paused, self._closed = True, False
            self._order.stopped()
            return True

    def close(self, error: CogTritonError) -> None:
        """Reject new requests, and fail all running and queued ones with `error`."""
        with self._changed:
            self._rejection = error
            self._paused, self._closed = False, True
            tickets = [*self._queue, *self._queue.running]
        for ticket in tickets:
            ticket.fail(error)

    def open(self) -> None:
        """The engine was started: let those go on that wait, and take new ones."""
        with self._changed:
            self._rejection = None
            self._paused = self._closed = False
            self._order.release()
            turns = self._next_turns()
        _tell(turns)

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or is queued; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self.running or self.waiting), timeout)


def _condemn(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        stay = ticket.stay
        text = f"the engine died {stay.suspected} times when it got this request"
        if stay.suspected > stay.blamed:
            text += f", {stay.blamed} of them with no other to blame"
        ticket.fail(FatalRequest(text))


def _tell(turns: Iterable[Ticket]) -> None:
    """Tell tickets that it is their turn; nothing is locked, since they may leave at once."""
    for ticket in turns:
        ticket._on_turn()


def admission_for(settings: Settings, max_batch_size: int) -> Admission:
    """Admission control with the engine's batch size as limit, and a queue four times as long.

    MAX_CONCURRENCY and MAX_QUEUE override both. A longer queue only makes its last ones wait for
    more than four whole batches. Beyond COG_MAX_CONCURRENCY the front refuses predictions.
    """
    slots = settings.max_concurrency or max_batch_size
    queue = settings.max_queue
    if queue is None:
        queue = max(_LEAST_QUEUE, _QUEUED_BATCHES * slots)
    if (cog_limit := settings.cog_max_concurrency) < slots:
        _log.warning(
            "COG_MAX_CONCURRENCY=%d: the engine takes %d at once, which predictions cannot reach;"
            " it can be %d, and the OpenAI API has no such limit",
            cog_limit,
            slots,
            MAX_SLOTS,
        )
    return Admission(slots, queue, resumes=settings.resume)
