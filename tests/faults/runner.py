"""Runner: the plan of each engine, one fault after the other, on as few servers as that takes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from faults.answers import COMPLETE, LEFT, Question
from faults.engines import PROFILES, Profile
from faults.injections import INJECTIONS, NoVictim
from faults.load import Load
from faults.processes import Held
from faults.record import Record, Records
from faults.report import missed
from faults.scenario import Event, Scenario, Setup
from faults.scenario import Load as LoadShape
from faults.setups import prepared, why_not
from faults.strike import Striker
from faults.target import ServerFailure, Target, served

_WARM_UP_S, _POLL_S, _IDLE_S = 120.0, 0.02, 1.0
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
    """Runs the events of one engine until they or the time are over."""

    def __init__(
        self, scenarios: dict[str, Scenario], records: Records, log: Path, deadline: float, say: Say
    ) -> None:
        """`deadline` is by time.monotonic(); `log` gets the logs of all servers."""
        self.scenarios, self.records, self.log = scenarios, records, log
        self.deadline, self.say = deadline, say
        self.left_out = 0
        """Questions that were left out, since near ties are possible in their texts."""
        self._questions: list[Question] = []

    async def run(self, events: Sequence[Event]) -> None:
        """Run the events that have no record yet, all of one engine."""
        todo = [one for one in events if one.number not in self.records.done]
        # Servers of a setup of their own come last, each for all of its faults.
        todo.sort(key=lambda one: (self._server_of(one)[0] != Setup(), repr(self._server_of(one))))
        while todo and time.monotonic() < self.deadline:
            first, profile = todo[0], PROFILES[todo[0].engine]
            with (
                tempfile.TemporaryDirectory(prefix="cog-triton-setup-") as directory,
                prepared(
                    profile, self._server_of(first)[0], Path(directory), first.number
                ) as start,
            ):
                async with served(start, self.log) as target:
                    await self._on_one_server(target, profile, todo)

    def _server_of(self, event: Event) -> tuple[Setup, LoadShape]:
        """What faults must have in common to strike one server."""
        scenario = self.scenarios[event.scenario]
        return scenario.setup, scenario.load

    async def _on_one_server(self, target: Target, profile: Profile, todo: list[Event]) -> None:
        """Strike until the server has ended; what was done is taken from `todo`."""
        if not self._questions:
            self._questions, self.left_out = await profile.questions(
                target, self.records.header.seed
            )
        here = self._server_of(todo[0])
        load = Load(
            target.urls,
            await target.model(),
            self._questions,
            here[1],
            str(todo[0].number),
        )
        async with load.running():
            striker = Striker(target, load, await warm_up(target, load))
            while todo and time.monotonic() < self.deadline and not target.has_ended:
                if self._server_of(todo[0]) != here:
                    return
                self._add(await self._strike(striker, todo.pop(0)))

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
            f"{event.number + 1}/{self.records.header.faults} {event.engine}, {event.scenario} of"
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
    if bad := [str(one) for one in load.take_ended() if one.outcome not in (COMPLETE, LEFT)]:
        raise ServerFailure(f"an undisturbed server answered {bad[0]}")
    await asyncio.sleep(_IDLE_S)
    return target.held()


def _seconds(record: Record) -> str:
    if record.ended_s is not None:
        return f"all ended after {record.ended_s:.2f} s"
    return "never back" if record.back_s is None else f"back after {record.back_s:.1f} s"
