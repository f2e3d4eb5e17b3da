"""Runner: strikes servers under load, by a plan, and accounts for every stream of each strike.

with served(start) as target:
    account = struck(target, "mock", Strike("kill", "engine"), streams=8)
assert account.problems == []
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from _report import say

from cog_triton.system import reaper
from faults import engines
from faults.apis import COMPLETE, LEFT, OTHER, Question
from faults.ledger import SILENCE_S, Account, silent_until
from faults.load import Load
from faults.processes import Held
from faults.scenario import Event, Scenario, lives
from faults.strikes import STRIKES, NoVictim, Strike
from faults.target import ServerFailure, Target, served

_WARM_UP_S, _FLOW_S, _DRAIN_S, _SETTLE_S = 120.0, 90.0, 120.0, 15.0
_POLL_S, _IDLE_S = 0.05, 1.0
_SPARE = Held(0, 0, 0, 8)
"""Descriptors come and go with connections that are kept."""
MayEnd = Mapping[str, Sequence[str]]


def struck(
    target: Target, engine: str, strike: Strike, streams: int = 8, may_end: MayEnd | None = None
) -> Account:
    """Strike a READY server once, amid streams of every API; `may_end` is as of `Ledger.account`.

    Raises ServerFailure if it does not serve before.
    """

    async def run() -> Account:
        load = Load.of(target, engine, engines.questions(engine, target, 1), streams)
        async with load.running():
            before = await warm_up(target, load)
            return await Striker(target, load, before).strike(strike, may_end=may_end)

    return asyncio.run(run())


async def warm_up(target: Target, load: Load) -> Held:
    """Let every user be answered once; returns what the server holds when it is idle then."""
    load.resume()
    while len(load.ledger.open) < len(load):
        await asyncio.sleep(_POLL_S)
    await load.until_ended(list(load.ledger.open), _WARM_UP_S)
    load.hold()
    await load.until_ended(list(load.ledger.open), _WARM_UP_S)
    good = (COMPLETE, OTHER, LEFT)
    if bad := [str(one) for one in load.ledger.take() if one.outcome not in good]:
        raise ServerFailure(f"an undisturbed server answered {bad[0]}")
    await asyncio.sleep(_IDLE_S)
    return target.held()


class Striker:
    """Strikes of one server under one load; `before` is what the idle server held at first."""

    def __init__(self, target: Target, load: Load, before: Held) -> None:
        self.target, self.load, self.before = target, load, before

    async def strike(
        self,
        strike: Strike,
        after: float = 0.0,
        back_within: float = 120.0,
        may_end: MayEnd | None = None,
    ) -> Account:
        """Strike once half the users have text and the server has been READY for `after` seconds.

        Returns the account, once it is READY again within `back_within` seconds, and idle.
        """
        await self._until_flowing(after)
        self.load.ledger.take()
        began, flight = time.monotonic(), self.load.ledger.established
        back_s, failure, held = None, "", dict[str, int]()
        try:
            await strike.inject(self.target)
            over = time.monotonic()
            if STRIKES[strike.fault].ends:
                held = await self._until_gone()
                back_s = 0.0
            else:
                ready = await self._until_back(back_within)
                silent = silent_until(flight, began, over)
                is_late = silent > over or ready - over > 2 * SILENCE_S
                back_s = max(silent, ready) - over if is_late else 0.0
                held = await self._until_settled()
        except (ServerFailure, NoVictim) as error:
            failure = str(error)
            self.load.hold()
            await self.load.until_ended(list(self.load.ledger.open), _IDLE_S)
        account = self.load.ledger.account(flight, may_end)
        account.back_s, account.held = back_s, held
        account.problems += [failure] if failure else []
        return account

    async def _until_flowing(self, after: float) -> None:
        self.load.resume()
        deadline = time.monotonic() + _FLOW_S
        while (count := len(self.load.ledger.established)) < len(self.load) * 0.5:
            if time.monotonic() > deadline:
                raise ServerFailure(f"only {count} streams flow: {self.target.tail()}")
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(max(0.0, self.target.ready_at + after - time.monotonic()))

    async def _until_back(self, seconds: float) -> float:
        """Wait until it is READY and all answers have ended; returns when it was READY."""
        await asyncio.sleep(SILENCE_S)
        self.target.ready_at = time.monotonic()  # at the earliest, for a restart may be over by now
        await self.target.until_ready(seconds)
        ready = self.target.ready_at
        self.load.hold()
        await self.load.until_ended(list(self.load.ledger.open), _DRAIN_S)
        await self.target.until_ready(seconds)
        return ready

    async def _until_gone(self) -> dict[str, int]:
        """See that the server has ended, and what of it is left."""
        self.load.hold()
        if not self.target.has_ended:
            raise ServerFailure(f"it runs on: {self.target.tail()}")
        left = len(reaper.descendants(self.target.server.pid) - {self.target.server.pid})
        await self.load.until_ended(list(self.load.ledger.open), _IDLE_S)
        return {"processes": left}

    async def _until_settled(self) -> dict[str, int]:
        """Wait until the idle server holds what it held before; returns what is beyond."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            beyond = asdict(self.target.held().beyond(self.before, _SPARE))
            beyond["requests"] = await asyncio.to_thread(self.target.engine_requests)
            if not any(beyond.values()) or time.monotonic() > deadline:
                return beyond
            await asyncio.sleep(_POLL_S)


class Runner:
    """Runs events on as few servers as that takes, until they or the time are over.

    `deadline` is by time.monotonic(). `directory` gets the servers' logs, and a line of JSON for
    each account as soon as there is one.
    """

    def __init__(self, scenarios: Mapping[str, Scenario], directory: Path, deadline: float) -> None:
        self.scenarios, self.directory, self.deadline = scenarios, directory, deadline
        self.accounts: list[tuple[Event, Account]] = []
        self.failures: list[str] = []
        """What must not be: aims that were missed, and servers that did not serve."""
        self._questions: dict[str, list[Question]] = {}

    def run(self, events: Iterable[Event]) -> None:
        """Run the events."""
        for life in lives(self.scenarios, events):
            while life and time.monotonic() < self.deadline:
                first = life[0]
                try:
                    self._one_server(life)
                except ServerFailure as error:
                    self._fail(f"{first.engine}, {first.scenario}: no server: {error}")
                    break

    def _one_server(self, life: list[Event]) -> None:
        """Strike until the server has ended; what was done is taken from `life`."""
        engine, of = life[0].engine, self.scenarios[life[0].scenario]
        log = self.directory / f"{engine}.log"
        with (
            engines.prepared(
                engine, has_clock=of.own_clock, as_image=of.as_image, busy=of.busy
            ) as start,
            served(start, log) as target,
        ):
            if engine not in self._questions:
                self._questions[engine] = engines.questions(engine, target, 1)
            asyncio.run(self._strikes(target, life))

    async def _strikes(self, target: Target, life: list[Event]) -> None:
        first, of = life[0], self.scenarios[life[0].scenario]
        load = Load.of(
            target,
            first.engine,
            self._questions[first.engine],
            of.streams,
            of.streamed,
            of.leaving,
            str(first.number),
        )
        async with load.running():
            striker = Striker(target, load, await warm_up(target, load))
            while life and time.monotonic() < self.deadline and not target.has_ended:
                event = life.pop(0)
                scenario = self.scenarios[event.scenario]
                account = await striker.strike(
                    Strike(scenario.fault, event.victim, event.lasts, event.number),
                    event.after,
                    scenario.back_within,
                    scenario.may_end.get(event.victim),
                )
                self._add(event, account)
                if account.back_s is None:
                    return

    def _add(self, event: Event, account: Account) -> None:
        self.accounts.append((event, account))
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "accounts.jsonl").open("a") as file:
            file.write(json.dumps(event._asdict() | vars(account)) + "\n")
        of = f"{event.number + 1}: {event.engine}, {event.scenario} of {event.victim}"
        ends = ", ".join(f"{count} {name}" for name, count in sorted(account.ends.items()))
        back = "never back" if account.back_s is None else f"back after {account.back_s:.1f} s"
        say(f"{of} ({event.lasts:g} s): {ends}; {back}")
        for missed in self.scenarios[event.scenario].missed(account):
            self._fail(f"{of}: {missed}")
            self.failures += [f"    {problem}" for problem in account.problems]

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        say(f"FAILED: {text}")
