"""Control streams: known text all the while, whose silences show what a disturbance costs others.

They run in a process of their own, so that what the disturbing client computes is no silence.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from cog_triton.bench.http_client import now
from faults.apis import CHAT, GOOD, PREDICTIONS, Question, plain
from faults.load import Load


@dataclass(frozen=True, slots=True)
class Heard:
    """What the control streams said: outcomes, an example of each bad one, longest silence."""

    outcomes: Counter[str]
    examples: dict[str, str]
    longest: float


class Control:
    """Control streams of one server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take(self) -> Heard:
        """What they said since the last call; raises RuntimeError if they have ended."""
        try:
            self._connection.send(None)
            found = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the control streams have ended, see above") from error
        assert isinstance(found, Heard)
        return found


@contextmanager
def controlled(
    urls: Mapping[str, str], engine: str, model: str, questions: Sequence[Question]
) -> Iterator[Control]:
    """Control streams run within the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = (urls, engine, model, questions, theirs)
    child = context.Process(target=_main, args=given, daemon=True)
    child.start()
    theirs.close()
    control = Control(ours)
    try:
        control.take()  # it is imported, and asks
        yield control
    finally:
        child.terminate()
        child.join()


def _main(
    urls: Mapping[str, str],
    engine: str,
    model: str,
    questions: Sequence[Question],
    connection: Connection,
) -> None:
    kinds = [plain(api.path, engine) for api in (PREDICTIONS, CHAT)]
    with suppress(KeyboardInterrupt):
        asyncio.run(_stream(Load(urls, engine, model, questions, kinds), connection))


async def _stream(load: Load, connection: Connection) -> None:
    async with load.running():
        since = now()
        while True:
            await asyncio.to_thread(connection.recv)
            at = now()
            longest = load.ledger.silence(since, at)
            ended, since = load.ledger.take(), at
            examples = {one.outcome: str(one) for one in ended if one.outcome not in GOOD}
            connection.send(Heard(Counter(one.outcome for one in ended), examples, longest))
