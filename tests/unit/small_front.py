"""A port of the front, before a server that answers as it is given to."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from starlette.types import Receive, Scope, Send

from cog_triton.errors import CogTritonError
from cog_triton.front.access import Access
from cog_triton.front.cog_gate import CogGate
from cog_triton.front.cog_state import Upstream
from cog_triton.front.gate import Gate, MetricsGate, OpenAIGate, Passed, PrivateGate
from cog_triton.front.http_protocol import Connections, PublicPort
from cog_triton.front.large_bodies import LargeBodies
from cog_triton.front.listener import Certificate, Listener
from cog_triton.front.message import Answer, Forward, Limits, Refused, Request, json_answer
from cog_triton.front.triton_gate import ServedModels, TritonGate
from cog_triton.front.triton_schema import ModelTensors
from cog_triton.front.webhook_relay import WebhookRelay, WebhookRules
from cog_triton.system.ports import BACKLOG, bind

_INPUTS = {"text_input": "BYTES", "seed": "UINT64", "stream": "BOOL", "half": "FP16"}
_INPUTS |= dict.fromkeys(("max_tokens", "input_ids", "input_lengths"), "INT32")
_INPUTS |= dict.fromkeys(("temperature", "prompt_embedding_table"), "FP32")
_INPUTS |= dict.fromkeys(("bytes", "mask"), "UINT8")
TENSORS = ModelTensors(_INPUTS, frozenset({"text_output", "output_ids"}))
LIMITS = Limits(body_bytes=1 << 20)
OPEN = Access(None, loopback=False)
LOCKED = Access("key", loopback=False)
KEY = [(b"authorization", b"Bearer key")]
PRIVATE_MODELS = ("engine_steps", "lora_loader")
TRITON = "/v2/models/tensorrt_llm"
P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATIENCE_S = 120


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run on an event loop as the server has."""

    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, on that event loop."""

    @wraps(test)
    def run_test(*arguments: P.args, **named: P.kwargs) -> None:
        run(test(*arguments, **named))

    return run_test


def route_to(port: int = 1, name: str = "PORT", **health: Any) -> tuple[Upstream, str]:
    """Way to an upstream whose every port is `port`; `health` is what its Cog has said."""

    async def made() -> Upstream:
        return Upstream({name: port})

    has_loop = asyncio._get_running_loop() is not None
    upstream = Upstream({name: port}) if has_loop else asyncio.run(made())
    if health:
        upstream.state.listens, upstream.state.schema = True, b"{}"
        upstream.state._take(health)
    return upstream, name


def arguments(*, cog_only: bool = False) -> Namespace:
    """Arguments of a server without a Cog of its own."""
    return Namespace(cog_only=cog_only, triton_only=False, model_repo=None, without_cog=None)


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application of the server."""


def gates(
    route: tuple[Upstream, str] | None = None,
    access: Access | None = None,
    bodies: LargeBodies | None = None,
) -> dict[str, PrivateGate]:
    """The gate of each port by what is behind it; all may pass that has no key to show."""
    ready = route or route_to(status="READY")
    common = (*ready, access or OPEN, Limits(), bodies or LargeBodies())
    served = {"metrics_public": True, "app": nothing}
    return {
        "cog": CogGate(*common, WebhookRelay(WebhookRules())),
        "openai": OpenAIGate(*common, **served),
        "metrics": MetricsGate(*common, **served),
        "triton": TritonGate(*common, OneModel()),
    }


def decided(
    gate: Any, method: str, path: str, body: bytes = b"", *headers: tuple[bytes, bytes]
) -> Any:
    """A gate's decision: a Forward, Passed or Answer; a refusal as its answer."""
    request = Request(method, path.encode(), list(headers), body, peer="203.0.113.9")

    async def main() -> Any:
        try:
            return await gate.decide(request)
        except Refused as refused:
            return gate.refusal(refused.status, refused.error)

    return asyncio.run(main())


def passed(gate: Any, *request: Any) -> Forward:
    """What becomes of a request that passes to a server; see `decided`."""
    found = decided(gate, *request)
    assert isinstance(found, Forward)
    return found


def let_in(gate: Any, *request: Any) -> Request:
    """The request that the server's own application gets; see `decided`."""
    found = decided(gate, *request)
    assert isinstance(found, Passed)
    return found.request


def answered(gate: Any, *request: Any) -> Answer:
    """The front's own answer to a request; see `decided`."""
    found = decided(gate, *request)
    assert isinstance(found, Answer)
    return found


def status(gate: Any, *request: Any) -> int:
    """200 for a request that passes; see `decided`."""
    found = decided(gate, *request)
    return found.status if isinstance(found, Answer) else 200


def revised(found: Forward, status: int, body: bytes) -> Answer | None:
    """What is in the place of a response to what passed."""
    assert found.revise is not None
    return found.revise(status, body)


class OneModel(ServedModels):
    """Models with the tensors of `TENSORS`, whatever they are called."""

    async def tensors(self, port: int, model: str) -> ModelTensors:
        return TENSORS


@dataclass(eq=False)
class PassGate(Gate):
    """Lets everything pass to `port`, with what is `changed`, and keeps what it saw."""

    port: int = 1
    changed: dict[str, Any] = field(default_factory=dict)
    seen: list[Request] = field(default_factory=list)

    async def decide(self, request: Request) -> Forward:
        self.seen.append(request)
        asked = (request.method, request.target, request.headers, request.body)
        return Forward(self.port, *asked, **self.changed)

    def refusal(self, status: int, error: CogTritonError, path: str = "") -> Answer:
        return json_answer(status, {"error": str(error)})


@dataclass
class Front:
    """A public port, its gate and its open connections."""

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


class Wire(asyncio.Transport):
    """A client's side that is fed to the protocol by hand; of what is written `unread` is left."""

    def __init__(self, gate: Gate, limits: Limits) -> None:
        super().__init__()
        connections = Connections(limits.connections, limits.all_bodies_bytes)
        self.protocol = PublicPort(gate, limits, connections).connection()
        self.written = b""
        self.closed = self.lost = False
        self.unread = 0
        self.protocol.connection_made(self)

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.protocol.data_received(piece)

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True
        if not self.unread:
            self.abort()

    def abort(self) -> None:
        self.closed = True
        if not self.lost:
            self.lost = True
            self.protocol.connection_lost(None)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def nothing(self) -> None: ...

    write_eof = pause_reading = resume_reading = nothing


async def until_end(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the end or a reset."""
    found = b""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            found += data
    return found


@asynccontextmanager
async def behind(handler: Handler) -> AsyncIterator[int]:
    """The port of a server of one request a connection; at the end it drops its connections."""
    writers: list[asyncio.StreamWriter] = []

    async def recorded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await handler(reader, writer)

    server = await asyncio.start_server(recorded, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def served(
    handler: Handler, limits: Limits | None = None, **changed: Any
) -> AsyncIterator[Front]:
    """A public port before `handler`; see `PassGate`."""
    async with behind(handler) as port, opened(PassGate(port, changed), limits) as front:
        yield front


def asked(handler: Handler, *pieces: bytes, limits: Limits | None = None, **changed: Any) -> bytes:
    """What a client gets of a port before `handler` that sends these pieces."""

    async def main() -> bytes:
        async with served(handler, limits, **changed) as front:
            return await front.ask(*pieces)

    return run(main())


@asynccontextmanager
async def opened(
    gate: Gate, limits: Limits | None = None, certificate: Certificate | None = None
) -> AsyncIterator[Front]:
    """A port with this gate."""
    limits = limits or Limits()
    connections = Connections(limits.connections, limits.all_bodies_bytes)
    listening = bind("PORT", "127.0.0.1", 0, BACKLOG)
    port = PublicPort(gate, limits, connections)
    front = Front(listening.getsockname()[1], gate, connections)
    listener = Listener(listening, port.connection, certificate)
    try:
        yield front
    finally:
        listener.close()
        for writer in front.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        connections.abort_all()
        ended = until(lambda: not (connections or port.state.tasks))
        await asyncio.wait_for(ended, PATIENCE_S)
        assert connections._free_bytes == limits.all_bodies_bytes


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
