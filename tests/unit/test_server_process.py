"""The server process: its start, its end with Cog, and a stop that waits for requests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from small_front import (
    arguments,
    gates,
    on_loop,
    route_to,
    run,
    until,
    until_end,
)
from starlette.types import Receive, Scope, Send

from cog_triton.errors import CogTritonError
from cog_triton.front import server
from cog_triton.front.message import Answer, Refused, Request
from cog_triton.front.server import Server
from cog_triton.serving.cog_messages import ADDRESS_VARIABLE
from cog_triton.settings import load_settings
from cog_triton.system.ports import BACKLOG, bind


@asynccontextmanager
async def behind_cog(**settings: Any) -> AsyncIterator[Any]:
    """A server without a Cog; its parent stores what it reports."""
    reports: list[Any] = []
    parent: Any = SimpleNamespace(has_loaded=False, send=reports.append, reports=reports)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, "none")
        patch.setattr(server, "listen", lambda address, obey: asyncio.sleep(0))
        made = Server(load_settings(), {}, {}, parent, arguments())
        made._settings = load_settings(**settings)
        yield made
        await made._front.close()


@pytest.mark.parametrize("for_cog", [True, False])
@on_loop
async def test_a_start_that_fails_has_a_code_and_is_logged_where_no_cog_does(
    for_cog: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise KeyError("nothing")

    async with behind_cog() as failing:
        failing._setup_log.for_cog, failing._start = for_cog, fail
        beginning = asyncio.ensure_future(failing._begin())
        await asyncio.wait({beginning})
        failing._on_begun(beginning)
        (report,) = failing._parent.reports
        error = "E2100 TritonUnknownError: internal error: KeyError"
        assert failing._health() == {"status": "SETUP_FAILED", "setup": {"logs": error}}
        assert (str(report.error), report.ends) == (error, False)
        assert caplog.messages[1:] == [error][for_cog:]


def test_a_drain_follows_once_cog_listens_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    answers = iter([[(5000, 7)], OSError("no file descriptor is left"), [(5000, 7)], [(80, 7)]])

    def look() -> Iterator[tuple[int, int]]:
        seen.append(answer := next(answers))
        if isinstance(answer, OSError):
            raise answer
        return iter(answer)

    async def main() -> None:
        async def drain() -> None:
            seen.append("drained")

        async with behind_cog() as serving:
            serving._runtime = SimpleNamespace(drain=drain)
            await serving._drain_with_cog(5000)

    monkeypatch.setattr(server, "listening_sockets", look)
    asyncio.run(main())
    assert [str(each) for each in seen][2:] == ["[(5000, 7)]", "[(80, 7)]", "drained"]


def test_processes_that_it_starts_get_no_key() -> None:
    names = ("COG_TRITON_API_KEY", "OPENAI_API_KEY", "COG_TRITON_KEYS", "TLS_KEY_FILE")
    shown = "import os; from cog_triton.front import server"
    shown += f"; print(server._settings().api_key, [os.environ.get(name) for name in {names}])"
    given = {**os.environ, **dict.fromkeys(names, "secret"), "TLS_CERT_FILE": "public"}
    done = subprocess.run(
        [sys.executable, "-c", shown], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"secret {[None] * 4}\n"


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
