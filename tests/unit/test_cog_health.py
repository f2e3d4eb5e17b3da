"""Cog's health: the HTTP client of /health-check, and when an unhealthy server ends."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from http_replies import while_serving

from cog_triton.errors import TritonStartFailed, TritonUnavailable
from cog_triton.serving.cog_health import NO_ANSWER, HealthClient, HealthMonitor
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports

SETTINGS = load_settings(cog_probe_failures=3, cog_probe_timeout=5, drain_timeout=25)
READY = {"status": "READY", "setup": {}}


class Handler(BaseHTTPRequestHandler):
    body = json.dumps(READY).encode()

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health-check" else 404)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def cog_that_answers(kind: type[Handler], host: str = "127.0.0.1") -> Iterator[int]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, 0), kind)
    with while_serving(server):
        yield server.server_port


def client(port: int, host: str = "127.0.0.1", **settings: Any) -> HealthClient:
    return HealthClient(load_settings(cog_host=host, port=port, **settings))


ADDRESSES = Path("/proc/net/if_inet6")
HAS_IPV6 = ADDRESSES.exists() and f"{1:032} " in ADDRESSES.read_text()


@pytest.mark.parametrize(
    ("bound", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), *[("::1", "::")] * HAS_IPV6],
)
def test_health_is_read_from_any_bound_address_without_a_proxy(
    bound: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with cog_that_answers(Handler, bound) as port:
        probe = client(port, asked)
        assert probe.read() == READY
        assert probe._has_answered


def test_health_is_empty_before_cog_listens() -> None:
    assert client(free_ports(1)[0]).read() == {}


FULL = b'{"error":"E2107 Overloaded: 4096 connections ask for something","status":"failed"}'


@pytest.mark.parametrize(
    ("body", "said"),
    [*((body, {}) for body in (b"", b"<html>", b"[]", b"null")), (FULL, {"status": "BUSY"})],
)
def test_health_is_empty_for_a_body_that_is_no_json_object(body: bytes, said: Any) -> None:
    with cog_that_answers(type("Answer", (Handler,), {"body": body})) as port:
        assert client(port).read() == said


def unhealthy(reason: str) -> dict[str, Any]:
    return {"status": "UNHEALTHY", "user_healthcheck_error": reason}


RESTARTING = unhealthy("Healthcheck failed: TritonUnavailable: E2105 TritonUnavailable: it died")
SILENT = {"status": NO_ANSWER}
GIVEN_UP = unhealthy("Healthcheck failed: TritonStartFailed: E2106 TritonStartFailed: given up")


def test_a_restart_of_triton_is_reported_once_and_so_is_its_end() -> None:
    monitor = HealthMonitor(0, SETTINGS)
    lines = [monitor.update(RESTARTING, now) for now in (1, 20, 40)]
    assert lines == ["E2105 TritonUnavailable: it died", None, None]
    assert monitor.update(SILENT, 40) is None
    assert str(monitor.failure) == "E2105 TritonUnavailable: it died"
    assert [monitor.update(READY, now) for now in (41, 42)] == ["Ready again", None]
    assert monitor.failure is None


def test_a_triton_that_was_given_up_ends_the_server() -> None:
    with pytest.raises(TritonStartFailed, match="given up"):
        HealthMonitor(0, SETTINGS).update(GIVEN_UP, 1)


@pytest.mark.parametrize(
    ("health", "reason"),
    [(unhealthy("healthcheck timed out"), "timed out"), ({"status": "DEFUNCT"}, "has died")],
)
def test_other_failures_end_the_server_after_a_while(health: dict[str, Any], reason: str) -> None:
    monitor = HealthMonitor(0, SETTINGS)
    assert monitor.update(health, 4) is None
    monitor.update(READY, 5)
    assert monitor.update(health, 9) is None
    with pytest.raises(TritonUnavailable, match=reason):
        monitor.update(health, 11)


def test_a_server_that_takes_connections_and_is_silent_gives_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        probe = client(listening.getsockname()[1], cog_probe_timeout=0.05)
        assert probe.read() == {}  # it may be about to begin
        probe._has_answered = True
        assert probe.read() == {"status": NO_ANSWER}


def test_some_probes_in_a_row_without_an_answer_end_the_server() -> None:
    monitor = HealthMonitor(0, SETTINGS)
    for health in (SILENT, SILENT, READY, SILENT, SILENT):
        assert monitor.update(health, 1) is None
    with pytest.raises(TritonUnavailable, match="did not answer 3 health checks in a row"):
        monitor.update(SILENT, 2)


def test_a_server_that_listens_no_more_may_take_its_drain_timeout_to_exit() -> None:
    monitor = HealthMonitor(0, SETTINGS)
    monitor.update(READY, 10)
    assert monitor.update({}, 49) is None
    with pytest.raises(TritonUnavailable, match="has not listened for 40 s"):
        monitor.update({}, 51)
