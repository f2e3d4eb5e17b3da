"""Each process of a server stopped or killed in turn, and what becomes of requests on the way.

After the signal every request must end in time, right or with a code; and a newcomer must be
served, or the parent of all have ended. A reaper is stopped at the moment its child dies.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _control_stream import (
    Control,
    NotServed,
    ask,
    controlled,
    in_thread,
    is_running,
    model_of,
    question,
)
from _report import as_data
from _resource_usage import role_of
from _servers import Server
from faults import kinds
from faults.answers import CHAT, CUT, GOOD, PREDICTIONS, Answer, Kind, Question

from cog_triton.bench.http_client import now
from cog_triton.system import reaper

DEADLINE_S = 90.0
MAY_WAIT_S = 45.0
"""What a stream may be silent for; the aim is 3 s and the resumption."""
_NEWCOMER_S, _STREAMS, _TOKENS = 10.0, 3, {"mock": 200, "openvino": 20}
_ENDING = "serve"
_CUTTING = (_ENDING, "server")
_LOSING = (*_CUTTING, "cog", "worker")
"""Roles whose loss ends all, cuts streams, and ends streams, of predictions at least."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a signal to a role did to requests; when a newcomer was served, or the end came.

    `gap` is the longest silence of the control streams in seconds.
    """

    role: str
    sent: str
    requests: Counter[str]
    seconds: float
    how: str
    gap: float

    @property
    def failed(self) -> bool:
        """Whether something hung, was lost without a code, or came back wrong."""
        bad = [kind for kind in self.requests if kind.startswith("wrong")]
        if self.role in _CUTTING:
            bad = [kind for kind in bad if not kind.startswith(f"wrong: {CUT}")]
        return bool(bad) or self.how.startswith("wrong") or self.gap > MAY_WAIT_S

    def row(self) -> dict[str, Any]:
        """As data."""
        return {**as_data(self), "failed": self.failed}


def roles(root: int) -> dict[str, int]:
    """PID of one process of each role below the harness's own reaper, whose PID is `root`."""
    found: dict[str, int] = {}
    for pid in reaper.descendants(root):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
            if words[0] and (role := role_of(words)) != "others":
                found[role] = pid
    return found


def plan(found: Mapping[str, int], wanted: str) -> Iterator[tuple[str, str, str]]:
    """Role, signal, and the role that dies meanwhile, of all whose ``ROLE SIGNAL`` has `wanted`."""
    for role in sorted(found):
        dies = role.removeprefix("reaper of ")
        meanwhile = dies if dies != role and dies in found else ""
        for name in ("SIGSTOP", "SIGKILL"):
            if wanted in f"{role} {name}":
                yield role, name, meanwhile if name == "SIGSTOP" else ""


async def strike_each(
    start: Callable[[], AbstractContextManager[Server]], engine: str, wanted: str, jobs: int
) -> list[Outcome]:
    """Signal every process whose ``ROLE SIGNAL`` contains `wanted`, each on a new server."""
    async with in_thread(start()) as target:
        await warm_up(target, engine)
        todo = list(plan(roles(target.pid), wanted))
    outcomes: list[Outcome] = []

    async def work() -> None:
        while todo:
            role, name, meanwhile = todo.pop(0)
            try:
                async with in_thread(start()) as target:
                    model = await warm_up(target, engine)
                    with controlled(target, engine) as control:
                        one = _Strike(target, engine, model, control)
                        outcome = await one.strike(role, name, meanwhile)
            except NotServed as error:
                outcome = Outcome(role, name, Counter(), 0.0, f"wrong: not struck: {error}", 0.0)
            outcomes.append(outcome)
            print(shown(outcome), flush=True)

    await asyncio.gather(*(work() for _ in range(jobs)))
    return sorted(outcomes, key=lambda one: (one.sent, one.role))


def shown(outcome: Outcome) -> str:
    """One line."""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.requests.items()))
    verdict = "FAILED " if outcome.failed else ""
    return (
        f"{verdict}{outcome.sent} of {outcome.role}: {counts}; {outcome.how},"
        f" {outcome.seconds:.1f} s; longest silence {outcome.gap:.1f} s"
    )


@dataclass(slots=True)
class _Strike:
    """One strike of a warm server."""

    target: Server
    engine: str
    model: str
    control: Control

    async def strike(self, role: str, name: str, meanwhile: str) -> Outcome:
        """Send a signal while requests run, and some that come after it."""
        found = roles(self.target.pid)
        if role not in found:
            return Outcome(role, name, Counter(), 0.0, "not there: its work was done", 0.0)
        asked = [await self._question(kind) for kind in _KINDS]
        mixed = [*zip(_KINDS, asked, strict=True)]
        running = [
            asyncio.create_task(self._ask(*one)) for one in mixed[:1] * (_STREAMS - 1) + mixed
        ]
        await asyncio.sleep(0.3)
        self.control.take()
        os.kill(found[role], signal.Signals[name])
        if meanwhile:
            with suppress(ProcessLookupError):
                os.kill(found[meanwhile], signal.SIGKILL)
        began = time.monotonic()
        running += [asyncio.create_task(self._ask(*one)) for one in mixed]
        how = await self._settled(role, mixed, began)
        seconds = time.monotonic() - began
        left = max(1.0, began + DEADLINE_S - time.monotonic())
        _, hanging = await asyncio.wait(running, timeout=left)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        with suppress(ProcessLookupError):
            os.kill(found[role], signal.SIGCONT)
        outcomes = Counter(
            "wrong: hangs" if task in hanging else said(task.result(), role) for task in running
        )
        sent = f"{name}, {meanwhile} killed" if meanwhile else name
        return Outcome(role, sent, outcomes, seconds, how, self.control.take().longest)

    async def _question(self, kind: Kind) -> Question:
        return await question(self.target, self.engine, self.model, kind, _TOKENS[self.engine])

    async def _ask(self, kind: Kind, asked: Question, seconds: float = DEADLINE_S) -> Answer:
        answer = Answer(kind, self.engine, asked, now())
        return await ask(self.target, self.model, answer, seconds)

    async def _settled(self, role: str, mixed: list[tuple[Kind, Question]], began: float) -> str:
        """Wait until a newcomer of every kind is served, or the server has ended."""
        while time.monotonic() < began + DEADLINE_S:
            if not is_running(self.target):
                return "ended, as it may" if role == _ENDING else "wrong: the server ended"
            answers = await asyncio.gather(*(self._ask(*one, _NEWCOMER_S) for one in mixed))
            if all(answer.outcome in GOOD for answer in answers):
                return "served again"
            await asyncio.sleep(0.2)
        return "wrong: neither served nor ended"


def said(answer: Answer, role: str) -> str:
    """How a request ended after a signal to a role; what has text ends with some of them alone."""
    outcome = answer.outcome
    if outcome in GOOD:
        return "right"
    if re.fullmatch(r"E\d{4}", outcome):
        is_lost = answer.reads and role not in _LOSING
        return f"wrong: {outcome} amid its text" if is_lost else outcome
    why = answer.error or (answer.broken or str(answer)).partition(": ")[0]
    return f"wrong: {outcome}: {why}"[:160]


async def warm_up(target: Server, engine: str) -> str:
    """Do work of every kind, which starts every child; returns the model's name."""
    model = await model_of(target)
    for kind in _KINDS * 2:
        asked = await question(target, engine, model, kind, 4)
        answer = await ask(target, model, Answer(kind, engine, asked, now()))
        if answer.outcome not in GOOD:
            raise NotServed(f"an undisturbed server answered {answer}")
    return model


_LARGE = replace(
    PREDICTIONS,
    body=lambda asked, model, streamed: {
        **PREDICTIONS.body(asked, model, streamed),
        "unused": "x" * (1 << 17),
    },
)
_KINDS = (
    kinds.plain(PREDICTIONS.path, "mock"),
    kinds.plain(CHAT.path, "mock"),
    replace(kinds.plain(PREDICTIONS.path, "mock"), name="a large body", api=_LARGE, streamed=False),
)
"""What runs: streams, a chat, and a body that a child of the server parses."""
