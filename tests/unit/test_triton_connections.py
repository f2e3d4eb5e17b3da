"""Connections to Triton: one reader thread, kept connections, failures; over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
from scripted_server import (
    HANG,
    PATIENCE_S,
    RESET,
    Answer,
    Part,
    Request,
    ScriptedServer,
    event,
    serving,
    stream,
    wait_until,
    whole,
)

from cog_triton.errors import TritonUnavailable
from cog_triton.triton.triton_connections import Exchange, TritonConnections

OK = whole(b"{}")


class Seen:
    """Receiver that keeps what it got, and the threads it was called on."""

    def __init__(self, fails: bool = False) -> None:
        self.payloads: list[bytes] = []
        self.end: tuple[int, bytes] | None = None
        self.error: TritonUnavailable | None = None
        self.ended = Event()
        self.threads: set[str] = set()
        self._fails = fails

    def on_payloads(self, payloads: list[bytes]) -> None:
        self.threads.add(threading.current_thread().name)
        self.payloads += payloads
        if self._fails:
            raise ValueError("broken receiver")

    def on_end(self, status: int, body: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        self.end = status, body
        self.ended.set()

    def on_failure(self, error: TritonUnavailable) -> None:
        self.threads.add(threading.current_thread().name)
        assert not self.ended.is_set(), "ended twice"
        self.error = error
        self.ended.set()

    def wait(self) -> Seen:
        assert self.ended.wait(2 * PATIENCE_S)
        return self


@contextmanager
def connected(answer: Answer, **options: Any) -> Iterator[tuple[TritonConnections, ScriptedServer]]:
    with serving(answer) as server:
        connections = TritonConnections(server.url, **options)
        try:
            yield connections, server
        finally:
            connections.close()


def asked(connections: TritonConnections, keep: bool = True, body: bytes = b"{}") -> Seen:
    seen = Seen()
    connections.send("/v2/x", body, seen, keep=keep)
    return seen


def opened(server: ScriptedServer) -> int:
    return len(server._connections)


def test_a_stream_is_received_as_it_arrives() -> None:
    more = Event()
    with connected(stream(event(a=1), more, event(a=2))) as (connections, server):
        seen = asked(connections)
        wait_until(lambda: seen.payloads == [b'{"a": 1}'])
        assert not seen.ended.is_set()
        more.set()
        seen.wait()
    assert seen.payloads == [b'{"a": 1}', b'{"a": 2}']
    assert seen.end == (200, b"")
    assert seen.threads == {"triton-reader"}
    assert server.requests[0].path == "/v2/x"


def test_an_answer_has_status_and_body() -> None:
    with connected([whole(b'{"error": "no"}', "400 Bad Request")]) as (connections, _):
        assert asked(connections).wait().end == (400, b'{"error": "no"}')


def test_connections_are_kept_and_used_again() -> None:
    with connected([OK]) as (connections, server):
        for _ in range(5):
            assert asked(connections).wait().end == (200, b"{}")
        assert opened(server) == 1
        assert asked(connections, keep=False).wait().end == (200, b"{}")
        assert opened(server) == 2


@pytest.mark.parametrize(
    "head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n"]
)
def test_connections_that_the_server_ends_are_not_kept(head: bytes) -> None:
    with connected([head + b"Content-Length: 2\r\n\r\n{}"]) as (connections, server):
        for _ in range(2):
            assert asked(connections).wait().end == (200, b"{}")
        assert opened(server) == 2


def dropping(kept: list[Part]) -> Answer:
    """Answers the first request, and does `kept` to the next on the same connection."""
    asked: list[Request] = []

    def answer(request: Request) -> list[Part]:
        asked.append(request)
        return kept if len(asked) == 2 else [OK]

    return answer


def test_a_request_on_a_connection_that_was_closed_meanwhile_is_sent_again() -> None:
    with connected(dropping([RESET])) as (connections, server):
        assert asked(connections).wait().end
        assert asked(connections, body=b'{"b": 1}').wait().end == (200, b"{}")
        assert opened(server) == 2
    assert [request.body for request in server.requests] == [b"{}", b'{"b": 1}', b'{"b": 1}']


def test_it_is_sent_again_only_once() -> None:
    with connected([OK]) as (connections, server):
        assert asked(connections).wait().end
        server.answer_with([RESET])
        assert "try again" in str(asked(connections).wait().error)
    assert len(server.requests) == 3


def test_a_request_whose_answer_has_begun_is_not_sent_again() -> None:
    with connected(dropping([OK[:-1], RESET])) as (connections, server):
        assert asked(connections).wait().end
        assert isinstance(asked(connections).wait().error, TritonUnavailable)
    assert len(server.requests) == 2


def test_a_kept_connection_that_the_server_closes_is_forgotten() -> None:
    with connected([OK, RESET]) as (connections, server):
        for count in range(1, 4):
            assert asked(connections).wait().end == (200, b"{}")
            wait_until(lambda: not connections._open)
            assert opened(server) == count
        assert connections._idle == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([RESET], "ended early"),
        ([*stream(event(a=1), end=False), RESET], "ended early"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], "not HTTP"),
    ],
)
def test_a_broken_answer_is_a_failure(answer: list[Part], said: str) -> None:
    with connected(answer) as (connections, server):
        error = asked(connections).wait().error
    assert said in str(error)
    assert str(error).endswith("try again")
    assert len(server.requests) == 1


def test_a_refused_connection_is_a_failure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        connections = TritonConnections(f"http://127.0.0.1:{unused.getsockname()[1]}")
        for _ in range(2):
            with pytest.raises(TritonUnavailable, match="try again"):  # told now or later
                raise asked(connections).wait().error or AssertionError
        connections.close()


@pytest.mark.parametrize("before", [[], stream(event(a=1), end=False)], ids=["at once", "later"])
@pytest.mark.parametrize("keep", [False, True])
def test_abort_closes_the_connection(before: list[Part], keep: bool) -> None:
    with connected([*before, HANG]) as (connections, server):
        seen = Seen()
        exchange = connections.send("/v2/x", b"{}", seen, keep=keep)
        request = server.request()
        wait_until(lambda: len(seen.payloads) == bool(before))
        exchange.abort()
        exchange.abort()
        assert isinstance(seen.wait().error, TritonUnavailable)
        assert request.left.wait(PATIENCE_S)
        assert len(server.requests) == 1, "not sent again"


def test_abort_after_the_end_leaves_the_next_request_alone() -> None:
    with connected([OK]) as (connections, server):
        seen = Seen()
        exchange = connections.send("/v2/x", b"{}", seen, keep=True)
        seen.wait()
        more = Event()
        server.answer_with([more, OK])
        second = asked(connections)
        server.request(1)
        exchange.abort()
        more.set()
        assert second.wait().end == (200, b"{}")
        assert opened(server) == 1


def test_a_large_body_reaches_a_slow_reader() -> None:
    body = b"[" + b"7," * 4_000_000 + b"7]"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = TritonConnections(f"http://127.0.0.1:{listener.getsockname()[1]}")
        seen = asked(connections, body=body)
        accepted, _ = listener.accept()
        with accepted, accepted.makefile("rb") as reader:
            while reader.readline() != b"\r\n":
                pass
            got = bytearray()
            while len(got) < len(body):
                got += reader.read(min(1 << 20, len(body) - len(got)))
            assert got == body
            assert not seen.ended.is_set()
            accepted.sendall(OK)
            assert seen.wait().end == (200, b"{}")
            connections.close()


def test_300_requests_run_at_once() -> None:
    count, all_here = 300, Event()

    def answer(request: Request) -> list[Part]:
        return [all_here, *stream(event(number=request.json), event(end=True))]

    with connected(answer) as (connections, server):
        seen = [asked(connections, body=str(number).encode()) for number in range(count)]
        server.request(count - 1)
        all_here.set()
        for number, one in enumerate(seen):
            assert one.wait().payloads == [b'{"number": %d}' % number, b'{"end": true}']
        assert len(connections._idle) <= 128
        wait_until(lambda: len(connections._open) == len(connections._idle))


def test_threads_share_kept_connections() -> None:
    def ask(connections: TritonConnections) -> None:
        for number in range(50):
            body = b'{"text": "%b"}' % (b"x" * (number % 7) * 1000)
            results.append(asked(connections, body=body).wait().end == (200, body))

    results: list[bool] = []
    with connected(lambda request: [whole(request.body)]) as (connections, server):
        threads = [threading.Thread(target=ask, args=[connections]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert opened(server) < 50
    assert results == [True] * 200


def test_close_fails_what_runs_and_refuses_the_next() -> None:
    with connected([HANG]) as (connections, server):
        seen = [asked(connections, keep=keep) for keep in (False, True)]
        server.request(1)
        connections.close()
        assert all("try again" in str(one.wait().error) for one in seen)
        assert connections._open == {}
        with pytest.raises(TritonUnavailable, match="the server is stopping"):
            asked(connections)
        connections.close()
    assert len(server.requests) == 2
    assert "triton-reader" not in {thread.name for thread in threading.enumerate()}


def test_close_while_a_request_connects_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected([HANG]) as (connections, _):
        connect = connections._connect

        def connect_late(exchange: Exchange) -> Any:
            connection = connect(exchange)
            connections.close()
            return connection

        monkeypatch.setattr(connections, "_connect", connect_late)
        with pytest.raises(TritonUnavailable, match="the server is stopping"):
            asked(connections)


def test_closing_without_a_request_ends() -> None:
    connections = TritonConnections("http://127.0.0.1:9")
    connections.close()
    with pytest.raises(TritonUnavailable):
        asked(connections)


def test_an_error_of_the_periodic_check_does_not_stop_the_reader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ticks: list[float] = []

    def on_tick(now: float) -> None:
        ticks.append(now)
        raise ValueError("broken check")

    with connected([OK], on_tick=on_tick) as (connections, _):
        assert asked(connections).wait().end
        wait_until(lambda: len(ticks) > 2)
        assert asked(connections).wait().end
    assert "broken check" in caplog.text


class Hopeless(Seen):
    """Receiver that raises whatever it gets."""

    def on_failure(self, error: TritonUnavailable) -> None:
        super().on_failure(error)
        raise ValueError("broken failure")


@pytest.mark.parametrize("kind", [Seen, Hopeless])
def test_an_error_of_a_receiver_fails_only_its_request(
    kind: type[Seen], caplog: pytest.LogCaptureFixture
) -> None:
    with connected(stream(event(a=1), event(a=2))) as (connections, _):
        broken = kind(fails=True)
        connections.send("/v2/x", b"{}", broken)
        assert "could not be handled" in str(broken.wait().error)
        assert asked(connections).wait().end == (200, b"")
    assert "broken receiver" in caplog.text
