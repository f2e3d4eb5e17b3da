"""Runner: the plans of all engines, on as few servers as that takes, some of them side by side."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from faults.answers import COMPLETE, LEFT, OTHER, Question
from faults.engines import PROFILES, Profile
from faults.injections import INJECTIONS, NoVictim
from faults.load import Load
from faults.processes import Held
from faults.record import Record, Records
from faults.report import missed
from faults.scenario import Event, Scenario, lives
from faults.setups import prepared, why_not
from faults.strike import Striker
from faults.target import ServerFailure, Target, served

_WARM_UP_S, _POLL_S, _IDLE_S = 120.0, 0.02, 1.0
_PREFIX = "cog-triton-setup-"
Say = Callable[[str], None]


def possible(scenarios: dict[str, Scenario]) -> tuple[dict[str, Scenario], dict[str, str]]:
    """Scenarios that this machine can run, and why it cannot run the others."""
    why = {
        name: INJECTIONS[one.fault].lacking() or why_not(one.setup)
        for name, one in scenarios.items()
    }
    fits = {name: one for name, one in scenarios.items() if why[name] is None}
    return fits, {name: reason for name, reason in why.items() if reason is not None}


class Runner:
    """Runs plans until they or the time are over."""

    def __init__(
        self,
        scenarios: dict[str, Scenario],
        records: Records,
        logs: Path,
        deadline: float,
        say: Say,
    ) -> None:
        """`deadline` is by time.monotonic(); `logs` is a directory, for a file of each engine."""
        self.scenarios, self.records, self.logs = scenarios, records, logs
        self.deadline, self.say = deadline, say
        self.failures: list[str] = []
        """Servers that did not start, or did not serve before they were struck."""
        self._questions: dict[str, list[Question]] = {}
        self._asking = asyncio.Lock()
        self._busy: Counter[str] = Counter()

    async def run(self, plans: Sequence[Sequence[Event]], jobs: int) -> None:
        """Run the events that have no record yet, on `jobs` servers at a time."""
        todo = [
            life
            for plan in plans
            for life in lives(self.scenarios, [one for one in plan if self._is_open(one)])
        ]
        workers = [asyncio.create_task(self._work(todo)) for _ in range(jobs)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _is_open(self, event: Event) -> bool:
        return event.number not in self.records.done

    async def _work(self, todo: list[list[Event]]) -> None:
        """Take lives until none is left, of the engine that the fewest others are at."""
        while todo and time.monotonic() < self.deadline:
            life = min(todo, key=lambda one: self._busy[one[0].engine])
            todo.remove(life)
            engine = life[0].engine
            self._busy[engine] += 1
            try:
                while life and time.monotonic() < self.deadline:
                    await self._on_one_server(PROFILES[engine], life)
            except ServerFailure as error:
                self.failures.append(f"{engine}, {life[0].scenario}: no server: {error}")
                self.say(self.failures[-1])
            self._busy[engine] -= 1

    async def _on_one_server(self, profile: Profile, todo: list[Event]) -> None:
        """Strike until the server has ended; what was done is taken from `todo`."""
        first, scenario = todo[0], self.scenarios[todo[0].scenario]
        with ExitStack() as stack:
            # In threads, beside which the streams of other servers go on.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))
            setup = prepared(profile, scenario.setup, directory, first.number)
            start = await asyncio.to_thread(stack.enter_context, setup)
            log = self.logs / f"{first.engine}.log"
            async with served(start, log) as target:
                questions = await self._questions_of(first.engine, profile, target)
                model, seed = await target.model(), str(first.number)
                load = Load(target.urls, first.engine, model, questions, scenario.load, seed)
                async with load.running():
                    striker = Striker(target, load, await warm_up(target, load))
                    while todo and time.monotonic() < self.deadline and not target.has_ended:
                        record = await self._strike(striker, todo.pop(0))
                        record.server = first.number
                        self._add(record)

    async def _questions_of(self, engine: str, profile: Profile, target: Target) -> list[Question]:
        async with self._asking:
            if engine not in self._questions:
                seed = self.records.header.seed
                self._questions[engine] = await profile.questions(target, seed)
        return self._questions[engine]

    async def _strike(self, striker: Striker, event: Event) -> Record:
        try:
            record = await striker.strike(event, self.scenarios[event.scenario])
        except (ServerFailure, NoVictim) as error:
            record = Record(event=event, problems=[str(error)])
            striker.target.process.terminate()
        return record

    def _add(self, record: Record) -> None:
        self.records.add(record)
        event, scenario = record.event, self.scenarios[record.event.scenario]
        verdict = "; ".join(missed(scenario, record))
        ends = ", ".join(f"{count} {name}" for name, count in sorted(record.ends.items()))
        self.say(
            f"{event.number + 1}/{self.records.header.total} {event.engine}, {event.scenario} of"
            f" {event.victim} ({event.lasts:g} s): {ends}; {_seconds(record)}"
            f"{f'; MISSED: {verdict}' if verdict else ''}"
        )


async def warm_up(target: Target, load: Load) -> Held:
    """Let every user be answered once; returns what the server holds when it is idle then."""
    load.resume()
    first = load.in_flight
    while len(first) < len(load):
        await asyncio.sleep(_POLL_S)
        first = load.in_flight
    await load.until_ended(first, _WARM_UP_S)
    load.hold()
    await load.until_ended(load.in_flight, _WARM_UP_S)
    good = (COMPLETE, OTHER, LEFT)
    if bad := [str(one) for one in load.take_ended() if one.outcome not in good]:
        raise ServerFailure(f"an undisturbed server answered {bad[0]}")
    await asyncio.sleep(_IDLE_S)
    return target.held()


def _seconds(record: Record) -> str:
    return "never back" if record.back_s is None else f"back after {record.back_s:.1f} s"
