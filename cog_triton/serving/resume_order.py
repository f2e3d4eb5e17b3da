"""Resumption order: whose turn it is after an engine's death, so that prefills are spread.

Suspects of a death are requests that got no token since they were sent to the engine. They go on
after all others and one at a time, each alone in prefill, so that the next death has one to blame.
A request that one more death would end goes first, alone in the engine, and its first token clears
it: kills from outside come while others make tokens, and would find the same one last each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_DEATHS = 3
"""Deaths that may be blamed on a request, without a token in between."""
_PREFILLS = 4


@dataclass(slots=True, eq=False)
class Stay:
    """Stay of a request in the engine, over all of its submissions; `number` is of its arrival."""

    number: int = 0
    epoch: int = 0
    """Deaths and stops before it was sent last."""
    exposed: bool = False
    """Whether it was sent, and has no token since."""
    suspect: bool = False
    """Whether it was a suspect of a death since its last token."""
    blamed: int = 0
    """Deaths of which it was the only suspect since then, of the last one alone in the engine."""
    suspected: int = 0
    """Deaths of which it was a suspect since then, alone or among others."""
    replica: int = 0
    """The engine that it was sent to last, of several."""

    @property
    def on_trial(self) -> bool:
        """Whether one more death condemns it."""
        return self.blamed == MAX_DEATHS - 1


class ResumeOrder:
    """Requests that wait to be sent again; not thread-safe."""

    def __init__(self) -> None:
        self.epoch = 0
        """Deaths and planned stops so far."""
        self._stopped = 0
        self._deaths: dict[int, int] = {}
        self._waiting: set[Stay] = set()
        self._released: set[Stay] = set()
        self._prefilling: set[Stay] = set()
        self._in_doubt = False
        """Whether a request was lost since the engine was found well: it may be dead."""

    @property
    def holds(self) -> bool:
        """Whether newcomers have to wait: some go on first, or a suspect is to be alone."""
        return bool(self._released) or any(stay.suspect for stay in self._prefilling)

    def died(self, running: Iterable[Stay], *, blame: bool = True) -> None:
        """The engine died, or the last of several, maybe of one of the suspects.

        Without `blame` it may have died of a request that is none of these.
        """
        running = list(running)
        suspects = [stay for stay in running if stay.exposed]
        in_engine = [
            stay for stay in running if not self._is_lost(stay) and stay not in self._released
        ]
        self.stopped()
        for stay in suspects:
            stay.suspect, stay.exposed = True, False
            stay.suspected += blame
            stay.blamed += blame and (in_engine if stay.on_trial else suspects) == [stay]

    def lost(self, running: Iterable[Stay], replica: int, *, blame: bool = True) -> None:
        """One of several engines died: what it had goes on at the others, at once.

        Others run at those, so that whoever is on trial is not alone; its prefill is.
        """
        there = [stay for stay in running if stay.replica == replica]
        suspects = [stay for stay in there if stay.exposed]
        self.epoch += 1
        self._deaths[replica] = self.epoch
        self._prefilling.difference_update(there)
        for stay in suspects:
            stay.suspect, stay.exposed = True, False
            stay.suspected += blame
            stay.blamed += blame and suspects == [stay]
        self._released |= set(filter(self._is_lost, self._waiting))
        self._in_doubt = self._waiting > self._released

    def stopped(self) -> None:
        """The engine was stopped on purpose: nobody is to blame."""
        self.epoch += 1
        self._stopped = self.epoch
        self._prefilling.clear()
        self._in_doubt = False

    def add(self, stay: Stay) -> None:
        """A request was interrupted; it may go on at once if the engine has returned since."""
        self._prefilling.discard(stay)
        self._waiting.add(stay)
        if self._is_lost(stay):
            stay.exposed = False
            self._released.add(stay)
        else:
            self._in_doubt = True

    def _is_lost(self, stay: Stay) -> bool:
        """Whether the engine that it was sent to has ended since."""
        return stay.epoch < max(self._stopped, self._deaths.get(stay.replica, 0))

    def release(self) -> None:
        """The engine is well: all may go on that wait now."""
        self._in_doubt = False
        for stay in self._waiting:
            stay.exposed = False
        self._released |= self._waiting

    def proven(self, stay: Stay) -> None:
        """A request got a token."""
        stay.exposed = stay.suspect = False
        stay.blamed = stay.suspected = 0
        self._prefilling.discard(stay)

    def remove(self, stay: Stay) -> None:
        """A request ended."""
        for places in (self._waiting, self._released, self._prefilling):
            places.discard(stay)

    def next_turns(self) -> list[Stay]:
        """Those whose turn it is now, in order of arrival.

        Suspects are last, by how often blamed, but for those on trial, which are first. None while
        the engine may be dead: all that are sent to it would be suspects.
        """
        turns: list[Stay] = []
        if self._in_doubt:
            return turns
        for stay in sorted(
            self._released,
            key=lambda stay: (not stay.on_trial, stay.suspect, stay.blamed, stay.number),
        ):
            alone = stay.suspect or any(other.suspect for other in self._prefilling)
            if len(self._prefilling) >= (1 if alone else _PREFILLS):
                break
            self._released.discard(stay)
            self._waiting.discard(stay)
            self._prefilling.add(stay)
            turns.append(stay)
        return turns
