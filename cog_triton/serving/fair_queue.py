"""Fair queue of admission control: virtual token counters, one a tenant.

A tenant's counter is its served tokens, of prompts and outputs, over its weight; the next slot goes
to the one whose counter is lowest (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024). One that had nothing in the queue is lifted to the lowest counter there, so that idle tenants
earn nothing. Without tenants, or with one, the queue is in order of arrival.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cog_triton.serving.tenants import Tenant
from cog_triton.serving.ticket import Ticket

HEAD_START = 4096
"""Tokens that a step of priority is worth between tenants, once, whatever their weights."""
PREFILL_TOKENS = 8192
"""Prompt tokens without a first token that others may have in the engine beside a guarded one."""
_RESERVED = 8
_RECENT_S = 60.0
_LONGEST_RETRY_S = 120.0
_MEMORY = 0.2
_MOST_KEPT = 64


Item = TypeVar("Item", bound=Ticket)


@dataclass(eq=False)
class Flow(Generic[Item]):
    """A tenant's requests; `settled` is its counter without those that run."""

    weight: float = 1.0
    settled: float = 0.0
    seen: float = 0.0
    waiting: list[Item] = field(default_factory=list)
    running: set[Item] = field(default_factory=set)
    admitted: float = 0.0
    interval: float = 1.0
    """Seconds between its admissions, smoothed."""
    refused: int = 0
    """Refusals since the last one."""

    @property
    def counter(self) -> float:
        """Served tokens over the weight."""
        return self.settled + sum(each.served for each in self.running) / self.weight

    @property
    def due(self) -> float:
        """Its counter with the head start of its first request: the lowest is next."""
        return self.counter + HEAD_START * self.waiting[0].priority


class FairQueue(Generic[Item]):
    """Requests that wait or run, by tenant."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._slots = slots
        self._clock = clock
        self._flows: dict[str, Flow[Item]] = {}
        self.running: set[Item] = set()
        """Those that hold a slot."""
        self.waiting = 0
        """Number of those that wait."""

    def __iter__(self) -> Iterator[Item]:
        return (each for flow in self._flows.values() for each in flow.waiting)

    def of(self, tenant: Tenant | None) -> Flow[Item]:
        """A tenant's requests."""
        return self._flows.get(tenant.name if tenant else "", Flow())

    def retry_after(self, tenant: Tenant | None) -> float:
        """Seconds until a place of a tenant is free for one that was refused, as things go."""
        flow = self._flows.setdefault(tenant.name if tenant else "", Flow())
        flow.refused += 1
        return min(_LONGEST_RETRY_S, max(1.0, flow.interval * flow.refused))

    def push(self, item: Item) -> None:
        """Put a request, which has a number, into the queue."""
        item.arrived = self._clock()
        if item.flow_name not in self._flows and len(self._flows) >= _MOST_KEPT:
            self._forget()
        flow = self._flows.setdefault(item.flow_name, Flow())
        if item.tenant is not None:
            flow.weight = item.tenant.weight
        if not flow.waiting and len(self._flows) > 1:
            self._lift(flow)
        flow.seen = item.arrived
        bisect.insort(flow.waiting, item, key=lambda each: each.rank)
        self.waiting += 1

    def pop(self) -> Item | None:
        """The request that takes a slot now; None if none may. Its queue time is from `arrived`."""
        if len(self.running) >= self._slots or (flow := self._next()) is None:
            return None
        item = flow.waiting.pop(0)
        self.waiting -= 1
        now = self._clock()
        if flow.admitted:
            flow.interval += _MEMORY * (now - flow.admitted - flow.interval)
        flow.admitted, flow.refused = now, 0
        flow.running.add(item)
        self.running.add(item)
        return item

    def remove(self, item: Item) -> None:
        """A request waits or runs no more; one that did neither is no error."""
        flow = self._flows.get(item.flow_name)
        if flow is None:
            return
        if item in flow.running:
            flow.running.remove(item)
            self.running.remove(item)
            flow.settled += item.served / flow.weight
            flow.seen = self._clock()
        elif item in flow.waiting:
            flow.waiting.remove(item)
            self.waiting -= 1
        if not self.running and not self.waiting and len(self._flows) > 1:
            self._forget()
            for flow in self._flows.values():  # nothing is left to share
                flow.settled = 0.0

    def _forget(self) -> None:
        """Keep those who wait, run, or were here lately."""
        now = self._clock()
        self._flows = {
            name: flow
            for name, flow in self._flows.items()
            if flow.waiting or flow.running or now - flow.seen < _RECENT_S
        }

    def _lift(self, flow: Flow[Item]) -> None:
        others = [each for each in self._flows.values() if each is not flow]
        busy = [each for each in others if each.waiting] or [
            each for each in others if each.running
        ]
        if busy:
            flow.settled += max(0.0, min(each.counter for each in busy) - flow.counter)

    def _next(self) -> Flow[Item] | None:
        if len(self._flows) == 1:
            (only,) = self._flows.values()
            return only if only.waiting else None
        now, reserve = self._clock(), self._slots // _RESERVED
        able = [flow for flow in self._flows.values() if flow.waiting]
        if any(_is_guarded(flow, reserve, now) for flow in self._flows.values()):
            able = [flow for flow in able if self._leaves_room(flow, reserve)]
        if len(able) < 2:
            return able[0] if able else None
        return min(able, key=lambda flow: (flow.due, len(flow.running) / flow.weight))

    def _leaves_room(self, flow: Flow[Item], reserve: int) -> bool:
        """Whether a tenant leaves enough to those who ask for little, as slots are not taken back.

        These find an eighth of the slots free, and few prompts before theirs.
        """
        if len(flow.running) >= reserve and self._slots - len(self.running) <= reserve:
            return False
        most = PREFILL_TOKENS - flow.waiting[0].prompt_tokens
        unmade = sum(each.prompt_tokens for each in self.running if not each.prefilled)
        return not unmade or unmade <= most


def _is_guarded(flow: Flow[Item], reserve: int, now: float) -> bool:
    """Whether a tenant was here lately, has nothing that waits, and takes little."""
    recent = bool(flow.running) or now - flow.seen < _RECENT_S
    return recent and not flow.waiting and len(flow.running) < max(1, reserve)
