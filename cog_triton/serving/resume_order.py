"""Resumption order: whose turn it is after an engine's death, so that prefills are spread.

Suspects of a death are requests that got no token since they were sent to the engine. They go on
after all others and one at a time, each alone in prefill, so that the next death has one to blame.
A request that one more death would end goes first, alone in the engine, and its first token clears
it: kills from outside come while others make tokens, and would find the same one last each time.
"""

from __future__ import annotations

from collections.abc import Iterable

from cog_triton.serving.ticket import Ticket

_PREFILLS = 4


class ResumeOrder:
    """Requests that wait to be sent again."""

    def __init__(self) -> None:
        self.epoch = 0
        """Deaths and planned stops so far."""
        self._stopped = 0
        self._deaths: dict[int, int] = {}
        self._waiting: set[Ticket] = set()
        self._released: set[Ticket] = set()
        self._prefilling: set[Ticket] = set()
        self._in_doubt = False
        """Whether a request was lost since the engine was found well: it may be dead."""

    @property
    def holds(self) -> bool:
        """Whether newcomers have to wait: some go on first, or a suspect is to be alone."""
        return bool(self._released) or any(ticket.suspect for ticket in self._prefilling)

    def died(self, running: Iterable[Ticket], *, blame: bool = True) -> None:
        """The engine died, or the last of several, maybe of one of the suspects.

        Without `blame` it may have died of a request that is none of these.
        """
        running = list(running)
        suspects = [ticket for ticket in running if ticket.exposed]
        in_engine = [one for one in running if not self._is_lost(one) and one not in self._released]
        self.stopped()
        for ticket in suspects:
            ticket.suspect, ticket.exposed = True, False
            ticket.suspected += blame
            ticket.blamed += blame and (in_engine if ticket.on_trial else suspects) == [ticket]

    def lost(self, running: Iterable[Ticket], replica: int, *, blame: bool = True) -> None:
        """One of several engines died: what it had goes on at the others, at once.

        Others run at those, so that whoever is on trial is not alone; its prefill is.
        """
        there = [ticket for ticket in running if ticket.replica == replica]
        suspects = [ticket for ticket in there if ticket.exposed]
        self.epoch += 1
        self._deaths[replica] = self.epoch
        self._prefilling.difference_update(there)
        for ticket in suspects:
            ticket.suspect, ticket.exposed = True, False
            ticket.suspected += blame
            ticket.blamed += blame and suspects == [ticket]
        self._released |= set(filter(self._is_lost, self._waiting))
        self._in_doubt = self._waiting > self._released

    def stopped(self) -> None:
        """The engine was stopped on purpose: nobody is to blame."""
        self.epoch += 1
        self._stopped = self.epoch
        self._prefilling.clear()
        self._in_doubt = False

    def add(self, ticket: Ticket) -> None:
        """A request was interrupted; it may go on at once if the engine has returned since."""
        self._prefilling.discard(ticket)
        self._waiting.add(ticket)
        if self._is_lost(ticket):
            ticket.exposed = False
            self._released.add(ticket)
        else:
            self._in_doubt = True

    def _is_lost(self, ticket: Ticket) -> bool:
        """Whether the engine that it was sent to has ended since."""
        return ticket.epoch < max(self._stopped, self._deaths.get(ticket.replica, 0))

    def release(self) -> None:
        """The engine is well: all may go on that wait now."""
        self._in_doubt = False
        for ticket in self._waiting:
            ticket.exposed = False
        self._released |= self._waiting

    def proven(self, ticket: Ticket) -> None:
        """A request got a token."""
        ticket.exposed = ticket.suspect = False
        ticket.blamed = ticket.suspected = 0
        self._prefilling.discard(ticket)

    def remove(self, ticket: Ticket) -> None:
        """A request ended."""
        for places in (self._waiting, self._released, self._prefilling):
            places.discard(ticket)

    def next_turns(self) -> list[Ticket]:
        """Those whose turn it is now, in order of arrival.

        Suspects are last, by how often blamed, but for those on trial, which are first. None while
        the engine may be dead: all that are sent to it would be suspects.
        """
        turns: list[Ticket] = []
        if self._in_doubt:
            return turns
        for ticket in sorted(
            self._released,
            key=lambda ticket: (not ticket.on_trial, ticket.suspect, ticket.blamed, ticket.number),
        ):
            alone = ticket.suspect or any(other.suspect for other in self._prefilling)
            if len(self._prefilling) >= (1 if alone else _PREFILLS):
                break
            self._released.discard(ticket)
            self._waiting.discard(ticket)
            self._prefilling.add(ticket)
            turns.append(ticket)
        return turns
