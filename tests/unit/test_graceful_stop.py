"""Graceful stop of the server: what is refused, closed, waited for, and ended at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from small_front import (
    Handler,
    arguments,
    gates,
    on_loop,
    read_request,
    route_to,
    run,
    served,
    until,
    until_end,
)
from starlette.types import Receive, Scope, Send

from cog_triton.errors import CogTritonError
from cog_triton.front import http_protocol
from cog_triton.front.message import Answer, Forward, Refused, Request
from cog_triton.front.server import Server
from cog_triton.serving.cog_messages import ADDRESS_VARIABLE
from cog_triton.settings import load_settings
from cog_triton.system.ports import BACKLOG, bind

TAKEN = [
    *("cog POST /predictions/abc/cancel", "cog HEAD /", "openai GET /metrics"),
    *("openai GET /v1/models", "openai DELETE /v1/responses/resp-1", "triton GET /v2/models/stats"),
    "openai POST /v1/responses/resp-1/cancel",
]
REFUSED = [
    *("cog PUT /predictions/abc", "openai POST /v1/embeddings", "openai POST /v1/responses"),
    *("metrics GET /health", "triton POST /v2/models/m/infer"),
    "triton GET /v2/models/m/versions/1/ready",
]


@pytest.mark.parametrize("line", TAKEN + REFUSED)
def test_a_stopping_server_takes_nothing_that_begins(line: str) -> None:
    gate, method, path = line.split()
    route = route_to(name="PORT" if gate == "cog" else "OPENAI_PORT", status="READY")
    route[0].stopping = True
    request = Request(method, path.encode(), [(b"host", b"localhost")], b"")
    deciding = gates(route)[gate].decide(request)
    if line in TAKEN:
        run(deciding)
    else:
        with pytest.raises(Refused, match="E2105 TritonUnavailable: the server is stopping") as why:
            run(deciding)
        assert why.value.status == 503


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def waiting() -> tuple[asyncio.Event, Handler]:
    """A server that answers once the event has come."""
    go = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await go.wait()
        writer.write(OK)
        writer.close()

    return go, slow


@on_loop
async def test_idle_connections_are_closed_and_busy_ones_answered_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "_LINGER_S", 3600.0)
    go, slow = waiting()
    async with served(slow) as front:
        idle, _ = await front.connect()
        busy, writer = await front.connect()
        writer.write(GET)
        await until(lambda: front.connections.answering)
        front.connections.refuse_reuse()
        assert await until_end(idle) == b""
        late, its_writer = await front.connect()
        its_writer.write(GET)
        go.set()
        assert (await until_end(busy)).endswith(b"ok")
        assert b"connection: close" in await until_end(late)
        assert not front.connections.answering


@on_loop
async def test_a_request_that_was_sent_before_its_client_could_know_of_the_stop_is_answered() -> (
    None
):
    go, slow = waiting()
    async with served(slow) as front:
        idle, its_writer = await front.connect()
        kept, writer = await front.connect()
        writer.write(GET * 3)
        await until(lambda: front.connections.answering and len(front.connections) == 2)
        front.connections.refuse_reuse()
        assert front.connections.may_ask
        its_writer.write(GET)
        go.set()
        for reader, count in ((kept, 2), (idle, 1)):
            answers = await until_end(reader)
            assert (answers.count(b"200 OK"), answers.count(b"connection: close")) == (count, 1)
        await until(lambda: not front.connections.may_ask)


def test_what_its_client_sent_unaware_of_the_stop_is_not_refused() -> None:
    route = route_to(status="READY")
    route[0].stopping = True
    body = b'{"input": {}}'
    headers = [(b"content-type", b"application/json"), (b"host", b"x")]
    unaware = Request("POST", b"/predictions", headers, body, unaware=True)
    assert isinstance(run(gates(route)["cog"].decide(unaware)), Forward)


class Work:
    """An application that answers once it may, and its runtime, which ends requests."""

    def __init__(self) -> None:
        self.asked, self.free = asyncio.Event(), asyncio.Event()
        self.answer = Answer(200, b"done")
        self.drains: list[float] = []
        self.admission = self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.set()
        await self.free.wait()
        await self.answer(scope, receive, send)

    def close(self, error: CogTritonError | None = None) -> None:
        self.answer = Answer(503, str(error).encode())
        self.free.set()

    async def drain(self, seconds: float) -> None:
        self.drains.append(seconds)


@asynccontextmanager
async def working(
    work: Work, **changed: Any
) -> AsyncIterator[tuple[Server, asyncio.Future[int], asyncio.Future[bytes]]]:
    """A server, what its `run` returns, and what a client gets of it that has asked for `work`."""
    listening = bind("OPENAI_PORT", "127.0.0.1", 0, BACKLOG)
    settings = load_settings(openai_port=1, cog_host="127.0.0.1", **changed)
    sockets = {"OPENAI_PORT": listening}
    triton = SimpleNamespace(stop=lambda: asyncio.sleep(0))
    parent: Any = SimpleNamespace(has_loaded=False, send=lambda message: None, triton=triton)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, "none")
        server: Any = Server(settings, sockets, {}, parent, arguments(cog_only=True))
    server._runtime, server._apps["OPENAI_PORT"].current = work, work
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
    got = asyncio.ensure_future(until_end(reader))
    ended = asyncio.ensure_future(server.run())
    await work.asked.wait()
    try:
        yield server, ended, got
    finally:
        writer.close()


@on_loop
async def test_what_runs_is_waited_for_and_read() -> None:
    work = Work()
    work.answer = Answer(200, bytes(8 << 20) + b"done")  # more than the kernel takes at once
    async with working(work, drain_timeout=600) as (server, ended, got):
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: server._upstream.stopping)
        await asyncio.sleep(0.1)
        assert not ended.done()
        work.free.set()
        assert (await got).endswith(b"done")
        assert await ended == 0
    assert 0 < work.drains[0] <= 600  # for asynchronous predictions


class Deaf(Work):
    """One whose requests do not end because they are to."""

    def close(self, error: CogTritonError | None = None) -> None:
        """Not obeyed."""


@pytest.mark.parametrize("work", [Work, Deaf])
@on_loop
async def test_a_second_signal_ends_it_and_one_after_a_shutdown_is_the_first(
    work: type[Work],
) -> None:
    async with working(work(), drain_timeout=3600) as (server, ended, got):
        server._upstream.ask_to_stop()
        await until(lambda: server._upstream.stopping)
        server._on_signal()
        await asyncio.sleep(0.1)
        assert not ended.done()
        assert not got.done()
        server._on_signal()
        assert await ended == 0
        seen = b"E2105 TritonUnavailable: the server stops at once" in await got
        assert seen is (work is Work)
