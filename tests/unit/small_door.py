"""A front door of one port, before a server that answers as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import uvloop

from cog_triton.door.access import Access
from cog_triton.door.client_connection import BACKLOG, ClientConnection, Connections, Listener
from cog_triton.door.cog_gate import CogGate
from cog_triton.door.gate import MetricsGate, OpenAIGate, PrivateGate
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.message import Answer, Forward, Refused, Request, json_answer
from cog_triton.door.relay import ReadCoalescing
from cog_triton.door.request_parser import Limits
from cog_triton.door.triton_bodies import ModelTensors
from cog_triton.door.triton_gate import ServedModels, TritonGate
from cog_triton.door.upstream import Route, Upstream
from cog_triton.door.upstream_connections import UpstreamConnections
from cog_triton.door.webhook_relay import WebhookRelay, WebhookRules
from cog_triton.errors import CogTritonError
from cog_triton.system.ports import bind

TENSORS = ModelTensors(
    {
        "text_input": "BYTES",
        "max_tokens": "INT32",
        "input_ids": "INT32",
        "input_lengths": "INT32",
        "seed": "UINT64",
        "stream": "BOOL",
        "temperature": "FP32",
        "prompt_embedding_table": "FP32",
        "half": "FP16",
        "bytes": "UINT8",
        "mask": "UINT8",
    },
    frozenset({"text_output", "output_ids"}),
)
LIMITS = Limits(body_bytes=1 << 20)
OPEN = Access(None, loopback=False)
LOCKED = Access("key", loopback=False)
KEY = [(b"authorization", b"Bearer key")]
PRIVATE_MODELS = ("engine_steps", "lora_loader")
TRITON = "/v2/models/tensorrt_llm"
P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATIENCE_S = 60


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run on the event loop that the front door has."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, PATIENCE_S)

    return uvloop.run(bounded())


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, on that event loop."""

    @wraps(test)
    def run_test(*arguments: P.args, **named: P.kwargs) -> None:
        run(test(*arguments, **named))

    return run_test


def route_to(port: int = 1, name: str = "PORT", **health: Any) -> Route:
    """Way to an upstream whose every port is `port`; `health` is what its Cog has said."""
    upstream = Upstream({name: port})
    if health:
        upstream.state.listens = True
        upstream.state._take(health)
    return Route(upstream, name)


def gates(
    route: Route | None = None, access: Access | None = None, bodies: LargeBodies | None = None
) -> dict[str, PrivateGate]:
    """The gate of each port by what is behind it; all may pass that has no key to show."""
    common = (
        route or route_to(status="READY"),
        access or OPEN,
        Limits(),
        bodies or LargeBodies(),
    )
    return {
        "cog": CogGate(*common, WebhookRelay(WebhookRules())),
        "openai": OpenAIGate(*common, metrics_public=True),
        "metrics": MetricsGate(*common, metrics_public=True),
        "triton": TritonGate(*common, OneModel()),
    }


def decided(
    gate: Any, method: str, path: str, body: bytes = b"", *headers: tuple[bytes, bytes]
) -> Forward | Answer:
    """A gate's decision; a refusal as its answer."""
    request = Request(method, path.encode(), list(headers), body, peer="203.0.113.9")

    async def main() -> Forward | Answer:
        try:
            found: Forward | Answer = await gate.decide(request)
            return found
        except Refused as refused:
            answer: Answer = gate.refusal(refused.status, refused.error)
            return answer

    return asyncio.run(main())


def passed(gate: Any, *request: Any) -> Forward:
    """What becomes of a request that passes; see `decided`."""
    found = decided(gate, *request)
    assert isinstance(found, Forward)
    return found


def answered(gate: Any, *request: Any) -> Answer:
    """The door's own answer to a request; see `decided`."""
    found = decided(gate, *request)
    assert isinstance(found, Answer)
    return found


def status(gate: Any, *request: Any) -> int:
    """200 for a request that passes; see `decided`."""
    found = decided(gate, *request)
    return 200 if isinstance(found, Forward) else found.status


def revised(found: Forward, status: int, body: bytes) -> Answer | None:
    """What is in the place of a response to what passed."""
    assert found.revise is not None
    return found.revise(status, body)


class OneModel(ServedModels):
    """Models with the tensors of `TENSORS`, whatever they are called."""

    async def tensors(self, port: int, model: str) -> ModelTensors:
        return TENSORS


@dataclass
class PassGate:
    """Lets everything pass to `port` over `connections`, and keeps what it saw."""

    port: int
    connections: UpstreamConnections = field(default_factory=UpstreamConnections)
    seen: list[Request] = field(default_factory=list)

    async def decide(self, request: Request) -> Forward | Answer:
        self.seen.append(request)
        return Forward(
            self.connections,
            self.port,
            request.method,
            request.target,
            request.headers,
            request.body,
            request.version,
        )

    def refusal(self, status: int, error: CogTritonError, path: str = "") -> Answer:
        return json_answer(status, {"error": str(error)})


@dataclass
class Door:
    """The door's port, its gate and its open connections."""

    port: int
    gate: Any
    connections: Connections
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def ask(self, *pieces: bytes) -> bytes:
        """Send the pieces, one after the other; all that is answered until the end."""
        reader, writer = await self.connect()
        try:
            with suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            return await until_end(reader)
        finally:
            writer.close()


async def until_end(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the end or a reset."""
    found = b""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            found += data
    return found


@asynccontextmanager
async def served(
    handler: Handler, limits: Limits | None = None, *, warm: bool = False
) -> AsyncIterator[Door]:
    """A door before `handler`, a server of one request a connection; `warm` makes some before."""
    backend = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        port = backend.sockets[0].getsockname()[1]
        connections = UpstreamConnections({port} if warm else ())
        async with opened(PassGate(port, connections), limits) as door:
            yield door
    finally:
        connections.close()
        backend.close()


def asked(handler: Handler, *pieces: bytes, limits: Limits | None = None) -> bytes:
    """What a client gets of a door before `handler` that sends these pieces."""

    async def main() -> bytes:
        async with served(handler, limits) as door:
            return await door.ask(*pieces)

    return run(main())


@asynccontextmanager
async def opened(gate: Any, limits: Limits | None = None) -> AsyncIterator[Door]:
    """A door with this gate."""
    limits = limits or Limits()
    connections = Connections(limits.connections, limits.all_bodies_bytes)
    sock = bind("PORT", "127.0.0.1", 0, BACKLOG)
    port = sock.getsockname()[1]
    coalescing = ReadCoalescing(asyncio.get_running_loop())
    listener = Listener(sock, lambda: ClientConnection(gate, limits, connections, coalescing))
    door = Door(port, gate, connections)
    try:
        yield door
    finally:
        listener.close()
        for writer in door.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        connections.abort_all()
        await until(lambda: len(connections) == 0)


def answering(response: bytes) -> Handler:
    """A server that answers every request with these bytes, and closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response)
        writer.close()

    return handler


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with the request as it came."""
    request = await read_request(reader)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(request) + request)
    writer.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + (await reader.readexactly(int(lines[0][15:])) if lines else b"")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
