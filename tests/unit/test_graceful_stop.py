"""Graceful stop of the front door: what is refused, closed, waited for, and ended at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from small_door import answering, gates, read_request, route_to, run, served, until, until_end

from cog_triton.door import client_connection
from cog_triton.door.client_connection import Connections
from cog_triton.door.front_door import FrontDoor, GracefulStop
from cog_triton.door.message import Forward, Refused, Request
from cog_triton.door.upstream import Chain, Route, Upstream
from cog_triton.settings import load_settings


@pytest.mark.parametrize(
    ("gate", "method", "path", "taken"),
    [
        ("cog", "POST", "/predictions", False),
        ("cog", "PUT", "/predictions/abc", False),
        ("cog", "POST", "/predictions/abc/cancel", True),
        ("cog", "GET", "/health-check", True),
        ("cog", "HEAD", "/", True),
        ("openai", "POST", "/v1/chat/completions", False),
        ("openai", "POST", "/v1/embeddings", False),
        ("openai", "GET", "/health", False),
        ("openai", "GET", "/metrics", True),
        ("openai", "GET", "/v1/models", True),
        ("openai", "GET", "/v1/responses/resp-1", True),
        ("openai", "DELETE", "/v1/responses/resp-1", True),
        ("openai", "POST", "/v1/responses/resp-1/cancel", True),
        ("openai", "POST", "/v1/responses", False),
        ("metrics", "GET", "/health", False),
        ("metrics", "GET", "/metrics", True),
        ("triton", "POST", "/v2/models/m/generate_stream", False),
        ("triton", "POST", "/v2/models/m/infer", False),
        ("triton", "GET", "/v2/health/ready", False),
        ("triton", "GET", "/v2/models/m/ready", False),
        ("triton", "GET", "/v2/models/m/versions/1/ready", False),
        ("triton", "GET", "/v2/health/live", True),
        ("triton", "GET", "/v2/models/stats", True),
    ],
)
def test_a_stopping_server_takes_nothing_that_begins(
    gate: str, method: str, path: str, taken: bool
) -> None:
    route = route_to(name="PORT" if gate == "cog" else "OPENAI_PORT", status="READY")
    route = Route(route.upstream, next(iter(route.upstream.ports)))
    route.upstream.stopping = True
    request = Request(method, path.encode(), [(b"host", b"localhost")], b"")
    deciding = gates(route)[gate].decide(request)
    if taken:
        run(deciding)
    else:
        with pytest.raises(Refused, match="E2105 TritonUnavailable: the server is stopping") as why:
            run(deciding)
        assert why.value.status == 503


def test_health_check_says_that_the_server_stops() -> None:
    route = route_to(status="READY")
    route.upstream.stopping = True
    answer: Any = run(gates(route)["cog"].decide(Request("GET", b"/health-check", [], b"")))
    assert b'"UNHEALTHY"' in answer.body
    assert b"E2105" in answer.body


def test_shutdown_is_a_stop_as_a_signal_is() -> None:
    route = route_to(status="READY")
    asked: list[bool] = []
    route.upstream.ask_to_stop = lambda: asked.append(True)
    request = Request("POST", b"/shutdown", [(b"host", b"localhost")], b"", peer="127.0.0.1")
    answer: Any = run(gates(route)["cog"].decide(request))
    assert (answer.status, asked) == (200, [True])


def test_idle_connections_are_closed_and_busy_ones_answered_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kept one is closed with its answer, not when another request was awaited, to refuse it."""
    monkeypatch.setattr(client_connection, "_LINGER_S", 3600.0)
    go = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    async def scenario() -> None:
        async with served(slow) as door:
            idle, _ = await door.connect()
            busy, writer = await door.connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: door.connections.answering)
            door.connections.refuse_reuse()
            assert await until_end(idle) == b""
            late, its_writer = await door.connect()
            its_writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            go.set()
            assert (await asyncio.wait_for(until_end(busy), 30)).endswith(b"ok")
            assert b"connection: close" in await until_end(late)
            assert not door.connections.answering

    run(scenario())


def test_a_request_that_was_sent_before_its_client_could_know_of_the_stop_is_answered() -> None:
    go = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    async def scenario() -> None:
        async with served(slow) as door:
            kept, writer = await door.connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
            await until(lambda: door.connections.answering)
            door.connections.refuse_reuse()
            go.set()
            answers = await asyncio.wait_for(until_end(kept), 30)
            assert answers.count(b"200 OK") == 2
            assert answers.count(b"connection: close") == 1

    run(scenario())


def test_a_request_under_way_to_an_idle_connection_is_answered() -> None:
    async def scenario() -> None:
        async with served(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")) as door:
            kept, writer = await door.connect()
            await until(lambda: len(door.connections) == 1)
            door.connections.refuse_reuse()
            assert door.connections.may_ask
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await asyncio.wait_for(until_end(kept), 30)
            assert b"200 OK" in answer
            assert b"connection: close" in answer
            await until(lambda: not door.connections.may_ask)

    run(scenario())


def test_what_its_client_sent_unaware_of_the_stop_is_not_refused() -> None:
    route = route_to(status="READY")
    route.upstream.stopping = True
    body = b'{"input": {}}'
    headers = [(b"content-type", b"application/json"), (b"host", b"x")]
    unaware = Request("POST", b"/predictions", headers, body, unaware=True)
    assert isinstance(run(gates(route)["cog"].decide(unaware)), Forward)


class Ended:
    """A reaper whose command ends when it is killed, or told to and `obeys`."""

    def __init__(self, *, obeys: bool) -> None:
        self.calls: list[str] = []
        self._obeys = obeys

    def poll(self) -> int | None:
        ends = "kill" in self.calls or (self._obeys and "terminate" in self.calls)
        return 0 if ends else None

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")


class NoPorts:
    def close(self) -> None:
        """Nothing to give back."""


def upstream_of(reaper: Any) -> Upstream:
    ports: Any = NoPorts()
    return Upstream({}, Chain(reaper, ports, None))


def test_what_runs_is_waited_for_and_a_second_signal_ends_it() -> None:
    async def scenario() -> list[str]:
        reaper = Ended(obeys=True)
        upstream = upstream_of(reaper)
        connections = Connections(10, 10)

        class Busy:
            is_idle, is_answered, has_unread = False, True, False

            def close(self) -> None:
                raise AssertionError("it is not idle")

            def abort(self) -> None:
                """Not called."""

        connections.add(Busy())
        stop = GracefulStop(upstream, connections, 600)
        running = asyncio.ensure_future(stop.run())
        stop.on_signal()
        await until(lambda: upstream.stopping)
        await asyncio.sleep(0.1)
        assert reaper.calls == []
        more = stop.patience(600)
        assert more()
        stop.on_signal()
        assert not more()
        stop.on_signal()
        await running
        return reaper.calls

    assert "terminate" not in run(scenario()), "it ends long before the 600 s of a drain"


def test_a_signal_after_a_shutdown_is_the_first() -> None:
    async def scenario() -> list[str]:
        reaper = Ended(obeys=True)
        upstream = upstream_of(reaper)
        stop = GracefulStop(upstream, Connections(10, 10), 600)
        running = asyncio.ensure_future(stop.run())
        upstream.ask_to_stop()
        stop.on_signal()
        await running
        return reaper.calls

    assert run(scenario())[0] == "terminate"


def test_a_drain_ends_in_time() -> None:
    async def scenario() -> list[str]:
        reaper = Ended(obeys=True)
        upstream = upstream_of(reaper)
        with upstream.connections.request():
            await upstream.drain(0.1)
        return reaper.calls

    assert run(scenario()).count("terminate") == 1


def test_clients_are_told_how_a_chain_that_has_died_left_them() -> None:
    class Ending:
        is_idle, is_answered, has_unread = False, True, False

        def close(self) -> None:
            """Not called."""

        abort = close

    async def scenario() -> bool:
        door, connection = FrontDoor(load_settings(), 100), Ending()
        door._connections.add(connection)
        flushing = asyncio.ensure_future(door._flush(lambda: False))
        await asyncio.sleep(0.1)
        waited = not flushing.done()
        connection.is_answered = False
        await flushing
        return waited

    assert run(scenario())
