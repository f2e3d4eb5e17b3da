"""Control streams: known text all the while, whose silences tell what a disturbance costs others.

They run in a process of their own, so that what the disturbing client computes is no silence.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from _load import QuickAckClient
from _servers import Server, status
from faults import kinds
from faults.answers import CHAT, COMPLETE, GOOD, PREDICTIONS, Answer, Kind, Question
from faults.known_text import KnownText
from faults.load import ask

from cog_triton.bench.http_client import now
from cog_triton.system import reaper

PROMPT = "Tell me about the sea."
CONTROLS = (PREDICTIONS, CHAT)
_TOKENS = {"mock": 150, "openvino": 20}
_AGAIN_S, _PATIENCE_S = 0.05, 300.0


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
"""Work of every kind, which starts every child of a server: a large body is parsed by one."""


class NotServed(RuntimeError):
    """A server that did not serve before anything was done to it."""


async def question(server: Server, engine: str, model: str, kind: Kind, tokens: int) -> Question:
    """A question with its text: the mock's is known, a model's is that of an undisturbed server."""
    if engine == "mock":
        text = KnownText()(tokens)
        return Question(PROMPT, tokens, text, {kind.flavour: text})
    first = Answer(kind, engine, Question(PROMPT, tokens, "", {kind.flavour: None}), now())
    await ask(QuickAckClient(_PATIENCE_S), server.urls, model, first)
    if first.outcome != COMPLETE:
        raise NotServed(f"an undisturbed server answered {first}")
    return Question(PROMPT, tokens, first.text, {kind.flavour: first.text})


async def warm_up(target: Server, engine: str) -> None:
    """Do work of every kind, which starts every child."""
    model = target.model()
    for kind in _KINDS * 2:
        asked = await question(target, engine, model, kind, 4)
        answer = Answer(kind, engine, asked, now())
        await ask(QuickAckClient(_PATIENCE_S), target.urls, model, answer)
        if answer.outcome not in GOOD:
            raise NotServed(f"an undisturbed server answered {answer}")


class User:
    """Client that asks again and again; `longest` is its longest silence in seconds."""

    def __init__(self) -> None:
        self._last = now()
        self.longest = 0.0

    def heard(self, at: float) -> None:
        """Note text."""
        self.longest, self._last = max(self.longest, at - self._last), at

    def take(self) -> float:
        """Longest silence since the last call, also one that still lasts."""
        found, self.longest = max(self.longest, now() - self._last), 0.0
        return found


class Watched(Answer):
    """Answer that reports each read of text to a `User`."""

    user: User

    def body(self, data: bytes, at: float) -> None:
        """See `BufferedResponse.body`."""
        count = len(self.reads)
        super().body(data, at)
        if len(self.reads) > count:
            self.user.heard(at)


@dataclass(slots=True)
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
def controlled(server: Server, engine: str) -> Iterator[Control]:
    """Control streams run within the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_main, args=(server, engine, theirs), daemon=True)
    child.start()
    theirs.close()
    control = Control(ours)
    try:
        control.take()  # it is imported, and asks
        yield control
    finally:
        child.terminate()
        child.join()


def _main(server: Server, engine: str, connection: Connection) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_stream(server, engine, connection))


async def _stream(server: Server, engine: str, connection: Connection) -> None:
    model, client = server.model(), QuickAckClient(_PATIENCE_S)
    heard = Heard(Counter(), {}, 0.0)

    async def run(kind: Kind, asked: Question, user: User) -> None:
        while True:
            answer = Watched(kind, engine, asked, now())
            answer.user = user
            await ask(client, server.urls, model, answer)
            heard.outcomes[answer.outcome] += 1
            if answer.outcome not in GOOD:
                heard.examples[answer.outcome] = str(answer)
                await asyncio.sleep(_AGAIN_S)

    users, running = [], []
    for api in CONTROLS:
        kind = kinds.plain(api.path, engine)
        asked = await question(server, engine, model, kind, _TOKENS[engine])
        users.append(User())
        running.append(asyncio.create_task(run(kind, asked, users[-1])))
    while True:
        await asyncio.to_thread(connection.recv)
        heard.longest = max(user.take() for user in users)
        connection.send(heard)
        heard = Heard(Counter(), {}, 0.0)


async def until_answered(server: Server, seconds: float) -> None:
    """Wait until /health-check says READY; raises TimeoutError after `seconds`, or its end."""
    deadline = time.monotonic() + seconds
    while (said := await asyncio.to_thread(status, server.url)) != "READY":
        if time.monotonic() > deadline or not reaper.descendants(server.pid):
            raise TimeoutError(f"not READY after {seconds:.0f} s, or ended: {said}")
        await asyncio.sleep(_AGAIN_S)
