"""`cog-triton serve` without its Cog: ports, environment, health, and what it says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import InvalidArgument, TritonStartFailed, TritonUnavailable
from cog_triton.serving.cog_process import CogServer, default_concurrency
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports


def server(host: str = "127.0.0.1", port: int | None = None, **settings: Any) -> CogServer:
    ports = free_ports(4)
    names = ("triton_http_port", "triton_grpc_port", "triton_metrics_port")
    own = dict(zip(names, ports[1:], strict=True))
    return CogServer(
        load_settings(**{**own, **settings}), host, port or ports[0], 16, verbose=False
    )


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind((host, 0))
        sock.listen()
        yield sock.getsockname()[1]


def refusal(cog: CogServer) -> str:
    said: list[str] = []
    with pytest.raises(InvalidArgument) as caught:
        cog.run(said.append)
    assert said == []
    return caught.value.detail


@pytest.mark.parametrize("name", ["TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"])
def test_a_port_that_is_taken_is_told_before_anything_starts(name: str) -> None:
    with listening() as port:
        said = refusal(server(**{name.lower(): port}))
    assert said.startswith(f"{name}={port}: ")
    assert f"127.0.0.1:{port}" in said
    assert "in use" in said


@pytest.mark.parametrize("name", ["OPENAI_PORT", "METRICS_PORT"])
def test_the_ports_of_our_own_server_are_looked_at_on_cogs_address(name: str) -> None:
    with listening() as port:
        assert refusal(server(**{name.lower(): port})).startswith(f"{name}={port}: cannot listen")


def test_our_own_server_gets_its_ports_and_its_address() -> None:
    environment = server("127.0.0.2", openai_port=8123)._environment()
    assert environment["COG_HOST"] == "127.0.0.2"
    assert (environment["OPENAI_PORT"], environment["METRICS_PORT"]) == ("8123", "")


def test_cogs_own_port_is_taken() -> None:
    with listening() as port:
        assert refusal(server(port=port)).startswith(f"PORT={port}: ")


def test_a_port_that_is_taken_on_one_address_is_taken_on_all() -> None:
    with listening() as port:
        assert refusal(server("0.0.0.0", port)).startswith(f"PORT={port}: ")


def test_two_ports_must_differ() -> None:
    (port,) = free_ports(1)
    said = refusal(server(port=port, triton_grpc_port=port))
    assert f"TRITON_GRPC_PORT={port}" in said
    assert "PORT too" in said


def test_an_address_that_is_not_ours() -> None:
    said = refusal(server("203.0.113.7"))
    assert said.startswith("PORT=")
    assert "203.0.113.7" in said


def test_free_ports_are_no_problem() -> None:
    server()._require_free_ports()


def test_the_mock_gets_its_options_and_room_for_those_that_wait() -> None:
    cog = server(cog_triton_engine="mock", mock_tps=100, mock_max_batch_size=8, mock_join=False)
    environment = cog._environment()
    assert environment["COG_TRITON_ENGINE"] == "mock"
    assert (environment["MOCK_TPS"], environment["MOCK_MAX_BATCH_SIZE"]) == ("100.0", "8")
    assert load_settings(mock_join=environment["MOCK_JOIN"]).mock_join is False
    assert default_concurrency(cog._settings) == 16
    assert default_concurrency(load_settings(cog_triton_engine="mock")) == 512
    assert default_concurrency(load_settings()) == 256


def test_everything_below_gets_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cog = server(
        engine_dir="engine",
        cog_weights="engine.tar",
        cog_triton_config="serve.yaml",
        cog_triton_work_dir="work",
        tritonserver="bin/tritonserver",
        triton_http_port=8123,
    )
    environment = cog._environment()
    # Cog runs in the runner's directory, so a relative path would mean another file there.
    assert environment["ENGINE_DIR"] == str(tmp_path / "engine")
    assert environment["COG_WEIGHTS"] == str(tmp_path / "engine.tar")
    assert environment["COG_TRITON_CONFIG"] == str(tmp_path / "serve.yaml")
    assert environment["COG_TRITON_WORK_DIR"] == str(tmp_path / "work")
    assert environment["TRITONSERVER"] == str(tmp_path / "bin" / "tritonserver")
    assert environment["TRITON_HTTP_PORT"] == "8123"
    assert environment["TRITON_HOST"] == "127.0.0.1"
    assert environment["PORT"] == str(cog._port)
    assert environment["COG_MAX_CONCURRENCY"] == "16"


@pytest.mark.parametrize("url", ["https://host/engine.tar?a=b", "file:///engines/a.tar"])
def test_urls_stay_urls(url: str) -> None:
    assert server(cog_weights=url)._environment()["COG_WEIGHTS"] == url


def test_the_log_is_quiet_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server()._environment()["COG_LOG_LEVEL"] == "error"
    monkeypatch.setenv("COG_LOG_LEVEL", "debug")
    assert server()._environment()["COG_LOG_LEVEL"] == "debug"


class Health(BaseHTTPRequestHandler):
    body: bytes

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health-check" else 404)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def health(body: bytes, host: str = "127.0.0.1") -> Iterator[int]:
    class IPv6(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with IPv6((host, 0), type("Answer", (Health,), {"body": body})) as answering:
        thread = threading.Thread(target=answering.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield answering.server_address[1]
        finally:
            answering.shutdown()
            thread.join()


READY = {"status": "READY", "setup": {}}


def test_health() -> None:
    with health(json.dumps(READY).encode()) as port:
        assert server(port=port)._health() == READY
        assert server("0.0.0.0", port)._health() == READY


def unhealthy(reason: str) -> bytes:
    return json.dumps({"status": "UNHEALTHY", "user_healthcheck_error": reason}).encode()


RESTARTING = "Healthcheck failed: TritonUnavailable: E2105 TritonUnavailable: it has died"
GIVEN_UP = "Healthcheck failed: TritonStartFailed: E2106 TritonStartFailed: given up"


def test_a_restart_of_triton_is_told_once_and_so_is_its_end() -> None:
    said: list[str] = []
    with health(unhealthy(RESTARTING)) as port:
        cog = server(port=port)
        for _ in range(3):
            cog._watch_health(said.append)
    assert said == ["E2105 TritonUnavailable: it has died"]
    with health(json.dumps(READY).encode()) as port:
        cog._port = port
        for _ in range(3):
            cog._watch_health(said.append)
    assert said[1:] == ["Ready again"]


def test_a_triton_that_was_given_up_ends_the_server() -> None:
    with health(unhealthy(GIVEN_UP)) as port, pytest.raises(TritonStartFailed, match="given up"):
        server(port=port)._watch_health(print)


def test_another_sickness_ends_it_after_a_while() -> None:
    with health(unhealthy("healthcheck timed out")) as port:
        cog = server(port=port)
        cog._healthy_at = time.monotonic()
        cog._watch_health(print)
        cog._healthy_at -= 60
        with pytest.raises(TritonUnavailable, match="timed out"):
            cog._watch_health(print)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_health_over_ipv6(host: str) -> None:
    with health(json.dumps(READY).encode(), "::1") as port:
        cog = server(host, port)
        assert cog._health() == READY


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:5000/"), ("127.0.0.1", ":5000/")])
def test_the_line_that_says_what_to_try(host: str, url: str) -> None:
    line = server(host, 5000)._ready_line(1.234)
    assert line.startswith("Ready in 1.2 s")
    assert f"{url}predictions" in line
    _, _, body = line.rpartition(" -d ")
    assert json.loads(body.strip("'"))["input"]["prompt"]


def test_health_before_cog_listens() -> None:
    assert server()._health() == {}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null"])
def test_health_that_is_none(body: bytes) -> None:
    with health(body) as port:
        assert server(port=port)._health() == {}


def test_health_of_what_speaks_no_http() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()

        def answer() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert server(port=sock.getsockname()[1])._health() == {}
        thread.join()


def test_health_is_asked_directly_whatever_the_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with health(json.dumps(READY).encode()) as port:
        assert server(port=port)._health() == READY
