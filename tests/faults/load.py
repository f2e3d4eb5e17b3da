"""Load: users that ask again and again, each for one kind of request of every API."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from _load import QuickAckClient

from cog_triton.bench.http_client import Client, TransportError, encode_request, now
from faults import kinds
from faults.answers import HUNG, LEFT, Answer, Kind, Question
from faults.scenario import Load as LoadShape

_PATIENCE_S = 600.0
_AGAIN_S, _LEAVES_S = 0.3, 3.0
_ESTABLISHED_S = 0.5
"""A request without text is taken to run once one that was sent so much later has text: by the
clock alone, what a busy machine has not read yet would count."""


class Load:
    """Users of one server, as many and of such kinds as `shape` says."""

    def __init__(
        self,
        urls: dict[str, str],
        engine: str,
        model: str,
        questions: Sequence[Question],
        shape: LoadShape,
        seed: str,
    ) -> None:
        """`urls` has the base URL of each path's first part."""
        self._urls, self._engine, self._model = urls, engine, model
        self._questions = questions
        self._rng = random.Random(seed)
        self._client = QuickAckClient(_PATIENCE_S)
        self._open = asyncio.Event()
        self._users: list[asyncio.Task[None]] = []
        self._tasks: dict[Answer, asyncio.Task[None]] = {}
        self._leaving = shape.leaving
        streamed = round(shape.streams * shape.streamed)
        self._kinds = [
            kind
            for of_way, count in ((True, streamed), (False, shape.streams - streamed))
            for kind in itertools.islice(itertools.cycle(_of_way(engine, of_way)), count)
        ]
        self._flowing = 0.0
        self.ended: list[Answer] = []
        """Answers that have ended, until `take_ended`."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Users ask within the block, while the load is not held."""
        self._users = [asyncio.create_task(self._user(kind)) for kind in self._kinds]
        self._open.set()
        try:
            yield
        finally:
            for task in (*self._users, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(*self._users, *self._tasks.values(), return_exceptions=True)
            self._client.close()

    def hold(self) -> None:
        """Ask nothing new."""
        self._open.clear()

    def resume(self) -> None:
        """Ask again."""
        self._open.set()

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def in_flight(self) -> list[Answer]:
        """Answers that have been asked for and have not ended."""
        return list(self._tasks)

    @property
    def established(self) -> list[Answer]:
        """Answers in flight that bring text, or were asked for before another that does."""
        sent = [one.sent for one in self._tasks if one.reads]
        self._flowing = max([self._flowing, *sent])
        before = self._flowing - _ESTABLISHED_S
        return [one for one in self._tasks if one.reads or one.sent < before]

    def take_ended(self) -> list[Answer]:
        """All answers that have ended since the last call."""
        taken, self.ended = self.ended, []
        return taken

    async def until_ended(self, answers: Iterable[Answer], seconds: float) -> None:
        """Wait for answers; what has not ended within `seconds` is left, as HUNG."""
        tasks = {self._tasks[one]: one for one in answers if one in self._tasks}
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        for task in pending:
            tasks[task].end(now(), HUNG)
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _user(self, kind: Kind) -> None:
        while True:
            await self._open.wait()
            question = self._rng.choice(self._questions)
            answer = Answer(kind, self._engine, question, now())
            task = asyncio.create_task(ask(self._client, self._urls, self._model, answer))
            self._tasks[answer] = task
            leaves = self._rng.random() < self._leaving
            patience = self._rng.uniform(0, _LEAVES_S) if leaves else None
            _, waiting = await asyncio.wait({task}, timeout=patience)
            if waiting:
                answer.end(now(), LEFT)
                task.cancel()
                await asyncio.wait({task})
            self._tasks.pop(answer, None)
            self.ended.append(answer)
            if answer.error or answer.broken:
                await asyncio.sleep(_AGAIN_S)


async def ask(client: Client, urls: Mapping[str, str], model: str, answer: Answer) -> None:
    """Send one request; how it ended is in the answer."""
    headers = {"Accept": "text/event-stream"} if answer.streamed else {}
    body = json.dumps(answer.request(model)).encode()
    path = answer.kind.api.path
    request = encode_request("POST", f"{urls[path.split('/')[1]]}{path}", headers, body)
    broken = None
    try:
        await client.send(*request, answer)
    except TransportError as error:
        broken = HUNG if error.kind == "timeout" else error.kind
    except OSError as error:
        broken = f"cannot connect: {error}"
    answer.end(now(), broken)


def _of_way(engine: str, streamed: bool) -> list[Kind]:
    return [kind for kind in kinds.of_engine(engine) if kind.streamed == streamed]
