"""Control streams: known text all the while, whose silences tell what a disturbance costs others.

They run in a process of their own, so that what the disturbing client computes is no silence.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from _load import QuickAckClient
from _servers import Server
from faults import kinds
from faults.answers import CHAT, COMPLETE, GOOD, HUNG, PREDICTIONS, Answer, Api, Kind, Question
from faults.known_text import KnownText

from cog_triton.bench.http_client import TransportError, encode_request, now
from cog_triton.system import reaper

PROMPT = "Tell me about the sea."
CONTROLS = (PREDICTIONS, CHAT)
_TOKENS = {"mock": 150, "openvino": 20}
_AGAIN_S, _PATIENCE_S, _MODEL_S, _ANSWER_S = 0.05, 300.0, 30.0, 10.0


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
    """A server that did not start, or did not serve before anything was done to it."""


@asynccontextmanager
async def in_thread(server: AbstractContextManager[Server]) -> AsyncIterator[Server]:
    """A server that is started and stopped in a thread; raises NotServed if it does not start."""
    try:
        target = await asyncio.to_thread(server.__enter__)
    except SystemExit as error:
        raise NotServed(str(error)) from error
    try:
        yield target
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


def url_of(server: Server, api: Api) -> str:
    """Address of an API on a server."""
    first = api.path.split("/")[1]
    base = {"predictions": server.url, "v1": server.openai, "v2": server.triton}[first]
    return f"{base}{api.path}"


async def model_of(server: Server) -> str:
    """Name of the model in /v1; raises NotServed if it is not told in time."""
    deadline = now() + _MODEL_S
    client = QuickAckClient(_MODEL_S)
    while True:
        try:
            answer = await client.fetch("GET", f"{server.openai}/v1/models", {})
            return str(json.loads(answer.text)["data"][0]["id"])
        except (KeyError, OSError, TransportError) as error:
            if now() > deadline:
                raise NotServed(f"/v1/models: {error}") from error
            await asyncio.sleep(_AGAIN_S)


async def ask(server: Server, model: str, answer: Answer, seconds: float = _PATIENCE_S) -> Answer:
    """Send one request; how it ended is in the answer."""
    headers = {"Accept": "text/event-stream"} if answer.streamed else {}
    body = json.dumps(answer.request(model)).encode()
    request = encode_request("POST", url_of(server, answer.kind.api), headers, body)
    broken = None
    try:
        await QuickAckClient(seconds).send(*request, answer)
    except TransportError as error:
        broken = HUNG if error.kind == "timeout" else error.kind
    except OSError as error:
        broken = f"cannot connect: {error}"
    answer.end(now(), broken)
    return answer


async def question(server: Server, engine: str, model: str, kind: Kind, tokens: int) -> Question:
    """A question with its text: the mock's is known, a model's is that of an undisturbed server."""
    if engine == "mock":
        text = KnownText()(tokens)
        return Question(PROMPT, tokens, text, {kind.flavour: text})
    first = Answer(kind, engine, Question(PROMPT, tokens, "", {kind.flavour: None}), now())
    await ask(server, model, first)
    if first.outcome != COMPLETE:
        raise NotServed(f"an undisturbed server answered {first}")
    return Question(PROMPT, tokens, first.text, {kind.flavour: first.text})


async def warm_up(target: Server, engine: str) -> str:
    """Do work of every kind, which starts every child; returns the model's name."""
    model = await model_of(target)
    for kind in _KINDS * 2:
        asked = await question(target, engine, model, kind, 4)
        answer = await ask(target, model, Answer(kind, engine, asked, now()))
        if answer.outcome not in GOOD:
            raise NotServed(f"an undisturbed server answered {answer}")
    return model


class Watched(Answer):
    """Answer that tells a `User` of each read of text."""

    user: User

    def body(self, data: bytes, at: float) -> None:
        """See `BufferedResponse.body`."""
        count = len(self.reads)
        super().body(data, at)
        if len(self.reads) > count:
            self.user.heard(at)


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
    model = await model_of(server)
    heard = Heard(Counter(), {}, 0.0)
    users: list[User] = []

    async def run(api: Api) -> None:
        kind = kinds.plain(api.path, engine)
        asked = await question(server, engine, model, kind, _TOKENS[engine])
        users.append(user := User())
        while True:
            answer = Watched(kind, engine, asked, now())
            answer.user = user
            outcome = (await ask(server, model, answer)).outcome
            heard.outcomes[outcome] += 1
            if outcome not in GOOD:
                heard.examples[outcome] = str(answer)
                await asyncio.sleep(_AGAIN_S)

    running = [asyncio.create_task(run(api)) for api in CONTROLS]
    while len(users) < len(CONTROLS):
        await asyncio.sleep(_AGAIN_S)
        for task in running:
            if task.done():
                task.result()
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_reader(connection.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        if not connection.poll():  # the loop may tell of one message twice; recv() would block it
            continue
        connection.recv()
        heard.longest = max(user.take() for user in users)
        connection.send(heard)
        heard = Heard(Counter(), {}, 0.0)


async def until_answered(server: Server, seconds: float) -> float:
    """Seconds until /health-check says READY; raises TimeoutError after `seconds`, or its end."""
    began = time.monotonic()
    while time.monotonic() < began + seconds and reaper.descendants(server.pid):
        with suppress(TransportError, OSError, ValueError, KeyError):
            answer = await QuickAckClient(_ANSWER_S).fetch("GET", f"{server.url}/health-check", {})
            if json.loads(answer.text)["status"] == "READY":
                return time.monotonic() - began
        await asyncio.sleep(_AGAIN_S)
    raise TimeoutError(f"not READY after {time.monotonic() - began:.0f} s, or ended")
