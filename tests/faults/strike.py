"""One fault: strike amid the streams, wait for the server's return, and account for everything."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from faults import processes
from faults.answers import ENDED, GOOD, HUNG, LEFT, WRONG, Answer
from faults.injections import INJECTIONS
from faults.load import Load
from faults.processes import Held
from faults.record import Record
from faults.scenario import Event, Scenario
from faults.target import ServerFailure, Target

_FLOW_S, _DRAIN_S, _SETTLE_S = 90.0, 120.0, 15.0
_SILENCE_S = 0.5
"""A silence of a stream that is longer than this is one that the fault has made."""
_LATER_S = 1.5
"""Such a silence begins so many seconds after the end of the fault, at most."""
_SPARE = Held(0, 0, 0, 8)
"""Descriptors come and go with connections that are kept."""


class Striker:
    """Strikes of one server under one load; `before` is what the idle server held at first."""

    def __init__(self, target: Target, load: Load, before: Held) -> None:
        self.target, self.load, self.before = target, load, before

    async def strike(self, event: Event, scenario: Scenario) -> Record:
        """Inject a fault amid the streams; returns the account of it."""
        record = Record(event=event)
        await self._until_flowing(scenario, event.after)
        self.load.take_ended()
        began = time.monotonic()
        flight = self.load.established
        record.in_flight = len(flight)
        rng = random.Random(event.number)
        injection = INJECTIONS[scenario.fault]
        try:
            await injection.inject(self.target, event.victim, event.lasts, rng)
            await self._until_back(record, flight, began, time.monotonic(), scenario)
        except ServerFailure as error:
            record.problems.append(str(error))
        self._account(record, flight, scenario.checks.may_end.get(event.victim, {}))
        return record

    async def _until_flowing(self, scenario: Scenario, after: float) -> None:
        """Wait until half the users have text, and the server has been READY for so long."""
        self.load.resume()
        deadline = time.monotonic() + _FLOW_S
        while (count := len(self.load.established)) < scenario.load.streams * 0.5:
            if time.monotonic() > deadline:
                raise ServerFailure(f"only {count} streams flow: {self.target.tail()}")
            await asyncio.sleep(0.05)
        await asyncio.sleep(max(0.0, self.target.ready_at + after - time.monotonic()))

    async def _until_back(
        self,
        record: Record,
        flight: Sequence[Answer],
        began: float,
        over: float,
        scenario: Scenario,
    ) -> None:
        """Wait until it is READY and all answers have ended, and see what it holds then."""
        await asyncio.sleep(_SILENCE_S)
        self.target.ready_at = time.monotonic()  # at the earliest, for a restart may be over by now
        await self.target.until_ready(scenario.checks.back_within)
        ready = self.target.ready_at
        self.load.hold()
        await self.load.until_ended(self.load.in_flight, _DRAIN_S)
        await self.target.until_ready(scenario.checks.back_within)
        silences = [_silence(one, began, over) for one in flight]
        silent_until = max((end for end in silences if end), default=0.0)
        late = silent_until > over or ready - over > 2 * _SILENCE_S
        record.back_s = max(0.0, max(silent_until, ready) - over) if late else 0.0
        await self._until_settled(record)
        record.memory_mb = round(processes.memory_mb(self.target.pid), 1)

    async def _until_settled(self, record: Record) -> None:
        """Wait until the idle server holds what it held before; what is beyond goes to `record`."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            record.engine_requests = await self.target.engine_requests()
            beyond = self.target.held().beyond(self.before, _SPARE)
            if not (record.engine_requests or any(asdict(beyond).values())):
                return
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        for name, value in asdict(beyond).items():
            setattr(record, name, value)
        roles = {role: len(pids) for role, pids in processes.by_role(self.target.pid).items()}
        record.problems.append(f"holds {beyond} beyond {self.before}: {roles}")

    def _account(
        self, record: Record, flight: Sequence[Answer], may_end: Mapping[str, Sequence[str]]
    ) -> None:
        ended = self.load.take_ended()
        begun = {id(one) for one in flight}
        ends: Counter[str] = Counter()
        for one in ended:
            outcome = one.outcome
            ours = id(one) in begun or bool(one.reads)
            if outcome == ENDED and not ours:
                outcome = "E2105"
            promised = ours and one.kind.api.path.split("/")[1] in may_end.get(outcome, ())
            is_good = promised or outcome in GOOD
            if outcome == WRONG:
                record.wrong += 1
            elif outcome == HUNG:
                record.hung += 1
            elif not is_good and ours:
                record.lost += 1
            elif not is_good:
                record.refused += 1
            if not is_good and (ours or outcome in (WRONG, HUNG)):
                record.problems.append(str(one))
            if ours and outcome != LEFT and not may_end:
                record.kinds.setdefault(one.kind.name, Counter())[outcome] += 1
            ends[outcome if ours or is_good else f"newcomer: {outcome}"] += 1
        record.ends = ends


def _silence(answer: Answer, began: float, over: float) -> float | None:
    """When the longest silence of a stream ended that a fault has made; None without one."""
    pairs = zip(answer.reads, answer.reads[1:], strict=False)
    found = [
        (end - start, end)
        for start, end in pairs
        if end > began and start < over + _LATER_S and end - start > _SILENCE_S
    ]
    return max(found)[1] if found else None
