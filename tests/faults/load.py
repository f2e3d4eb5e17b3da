"""Load: users that ask again and again, each for one kind of request of every API."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

from _load import QuickAckClient

from cog_triton.bench.http_client import Client, TransportError, encode_request, now
from faults.apis import HUNG, LEFT, Answer, Kind, Question, of_engine
from faults.ledger import Ledger
from faults.target import Target

PATIENCE_S = 600.0
_AGAIN_S, _LEAVES_S = 0.3, 3.0


class Load:
    """A user for each of `kinds`; the ledger has what became of each request.

    `urls` has the base URL of each path's first part, `leaving` is the share of requests whose
    client leaves.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        engine: str,
        model: str,
        questions: Sequence[Question],
        kinds: Sequence[Kind],
        leaving: float = 0.0,
        seed: str = "",
    ) -> None:
        self._urls, self._engine, self._model = urls, engine, model
        self._questions, self._kinds, self._leaving = questions, kinds, leaving
        self._rng = random.Random(seed)
        self._client = QuickAckClient(PATIENCE_S)
        self._open = asyncio.Event()
        self._tasks: dict[Answer, asyncio.Task[None]] = {}
        self.ledger = Ledger()

    @classmethod
    def of(
        cls,
        target: Target,
        engine: str,
        questions: Sequence[Question],
        streams: int,
        streamed: float = 0.5,
        leaving: float = 0.0,
        seed: str = "",
    ) -> Self:
        """So many streams at once, of all kinds that the engine can do by turns."""
        kinds = mixed(engine, streams, streamed)
        return cls(target.urls, engine, target.server.model(), questions, kinds, leaving, seed)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Users ask within the block, while the load is not held."""
        users = [asyncio.create_task(self._user(*one)) for one in enumerate(self._kinds)]
        self._open.set()
        try:
            yield
        finally:
            running = [*users, *self._tasks.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._client.close()
        for user in users:
            if not user.cancelled():
                user.result()

    def hold(self) -> None:
        """Ask nothing new."""
        self._open.clear()

    def resume(self) -> None:
        """Ask again."""
        self._open.set()

    def __len__(self) -> int:
        return len(self._kinds)

    async def until_ended(self, answers: Iterable[Answer], seconds: float) -> None:
        """Wait for answers; what has not ended within `seconds` is left, as HUNG."""
        tasks = {self._tasks[one]: one for one in answers if one in self._tasks}
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        for task in pending:
            tasks[task].end(now(), HUNG)
            task.cancel()
        while any(self._tasks.get(one) for one in tasks.values()):
            await asyncio.sleep(0)  # until its user has closed each

    async def _user(self, number: int, kind: Kind) -> None:
        while True:
            await self._open.wait()
            question = self._rng.choice(self._questions)
            answer = Answer(kind, self._engine, question, now(), number)
            task = asyncio.create_task(ask(self._client, self._urls, self._model, answer))
            self._tasks[answer] = task
            self.ledger.begin(answer)
            leaves = self._rng.random() < self._leaving
            patience = self._rng.uniform(0, _LEAVES_S) if leaves else None
            _, waiting = await asyncio.wait({task}, timeout=patience)
            if waiting:
                answer.end(now(), LEFT)
                task.cancel()
                await asyncio.wait({task})
            del self._tasks[answer]
            self.ledger.end(answer)
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


def mixed(engine: str, streams: int, streamed: float = 0.5) -> list[Kind]:
    """So many kinds that an engine can do, by turns; `streamed` is the share that stream."""
    ways = (True, round(streams * streamed)), (False, streams - round(streams * streamed))
    return [
        kind
        for way, count in ways
        for kind in itertools.islice(
            itertools.cycle([one for one in of_engine(engine) if one.streamed == way]), count
        )
    ]
