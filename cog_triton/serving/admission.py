"""Admission control: concurrency limit plus a bounded fair queue; rejects while unhealthy.

After a death of the engine, it also tells interrupted requests when to be sent again.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from cog_triton.errors import CogTritonError, FatalRequest, Overloaded
from cog_triton.serving.coglet.cog_server import MAX_SLOTS
from cog_triton.serving.fair_queue import FairQueue
from cog_triton.serving.resume_order import ResumeOrder
from cog_triton.serving.tenants import Tenant
from cog_triton.serving.ticket import MAX_DEATHS, Ticket
from cog_triton.settings import Settings

_log = logging.getLogger(__name__)

_LEAST_QUEUE = 64
_QUEUED_BATCHES = 4


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
        self._numbers = itertools.count()
        self._paused = self._closed = False
        self._queue: FairQueue[Ticket] = FairQueue(slots)
        self._rejection: CogTritonError | None = None
        self._end: CogTritonError | None = None
        self._left = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._queue.running)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._queue.waiting

    def enter(self, ticket: Ticket, on_turn: Callable[[], None]) -> None:
        """Ask for a slot, without waiting: the ticket has a `queue_time` once it holds one.

        `on_turn` is called if that comes later. Raises E2107 when the queue is full, or the error
        of `reject_new` or `close`. `leave` must follow.
        """
        if (rejection := self._end or self._rejection) is not None:
            raise copy.copy(rejection)
        ticket.number = next(self._numbers)
        self.require_room(1, ticket.tenant)
        self._queue.push(ticket)
        self._admit()
        if ticket.turn:
            ticket.queue_time = 0.0
        ticket.on_turn = on_turn

    def _admit(self) -> None:
        """Give slots to those of the queue that get them now."""
        while not (self._paused or self._order.holds) and (ticket := self._queue.pop()) is not None:
            ticket.queue_time = time.perf_counter() - ticket.arrived
            ticket.begin()

    def require_room(self, count: int, tenant: Tenant | None = None) -> None:
        """Raise E2107 unless `count` requests of a tenant have room now, to run or to wait.

        So that none of a group is begun when others of it would be rejected.
        """
        flow = self._queue.of(tenant)
        waiting, running = len(flow.waiting), len(flow.running)
        most = None if tenant is None else tenant.concurrent
        if tenant is not None and most is not None and running + waiting + count > most:
            whose, rule = f"requests of {tenant.name}", f"{most} may (concurrent of its key)"
        elif (running := self.running) + waiting + count > self.slots + self.max_queue:
            whose, rule = "predictions", f"{self.max_queue} may (MAX_QUEUE)"
        else:
            return
        error = Overloaded(
            f"{running} {whose} run and {waiting} wait, no more than {rule}; try again later"
        )
        error.retry_after = self._queue.retry_after(tenant)
        raise error

    def leave(self, ticket: Ticket) -> None:
        """Give the slot, or the place in the queue, back; a ticket without one is no error."""
        self._queue.remove(ticket)
        self._order.remove(ticket)
        self._give_turns()
        self._left.set()

    def sent(self, ticket: Ticket) -> None:
        """A request is about to be sent to the engine."""
        ticket.turn = False
        ticket.epoch = self._order.epoch
        ticket.exposed = True

    def proven(self, ticket: Ticket) -> None:
        """The engine has made a token of a request since it was sent."""
        ticket.prefilled = True
        self._order.proven(ticket)
        self._give_turns()

    def interrupt(self, ticket: Ticket) -> bool:
        """The engine was lost to a running request: whether it may wait for its return.

        Its `turn` comes when the engine was found well, or has been started again.
        """
        if not self.resumes or self._closed or ticket not in self._queue.running:
            return False
        self._order.add(ticket)
        self._give_turns()
        return True

    def release(self) -> None:
        """The engine is well: let those go on that were interrupted."""
        self._order.release()
        self._give_turns()

    def _give_turns(self) -> None:
        if not self._paused:
            for ticket in self._order.next_turns():
                ticket.begin()
            self._admit()

    def reject_new(self, error: CogTritonError) -> None:
        """Reject new requests with `error` for good; running and queued ones continue."""
        self._end = error

    @property
    def suspects(self) -> int:
        """Number of requests that the engine may die of now: sent, and without a token since."""
        return sum(ticket.exposed for ticket in self._queue.running)

    def pause(self, error: CogTritonError, *, blame: bool = True) -> None:
        """The engine has died: reject new requests with `error`; running and queued ones wait.

        One that too many deaths are blamed on ends with E2108; without `blame`, this is none.
        """
        self._rejection = error
        if not self._paused:
            self._paused, self._closed = True, False
            self._order.died(self._queue.running, blame=blame)
            self._condemn()

    def lose(self, replica: int, *, blame: bool = True) -> None:
        """One of several engines has died: what it had goes on at the others.

        For E2108 and `blame` see `pause`.
        """
        self._order.lost(self._queue.running, replica, blame=blame)
        self._condemn()
        self._give_turns()

    def _condemn(self) -> None:
        """End those that too many deaths are blamed on."""
        for ticket in tuple(self._queue.running):
            if ticket.blamed < MAX_DEATHS:
                continue
            text = f"the engine died {ticket.suspected} times when it got this request"
            if ticket.suspected > ticket.blamed:
                text += f", {ticket.blamed} of them with no other to blame"
            ticket.fail(FatalRequest(text))

    def hold(self, *, interrupt: bool) -> bool:
        """The engine is about to be stopped as planned: newcomers wait for its return.

        False, and nothing changes, while requests run; with `interrupt` they are to wait, too, if
        they can.
        """
        if self._queue.running and not (interrupt and self.resumes):
            return False
        self._paused, self._closed = True, False
        self._order.stopped()
        return True

    def close(self, error: CogTritonError) -> None:
        """Reject new requests, and fail all running and queued ones with `error`."""
        self._rejection = error
        self._paused, self._closed = False, True
        for ticket in [*self._queue, *self._queue.running]:
            ticket.fail(error)

    def open(self) -> None:
        """The engine was started: let those go on that wait, and take new ones."""
        self._rejection = None
        self._paused = self._closed = False
        self._order.release()
        self._give_turns()

    async def wait_until_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or is queued; False after `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.running or self.waiting:
                    self._left.clear()
                    await self._left.wait()
        return not (self.running or self.waiting)


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
