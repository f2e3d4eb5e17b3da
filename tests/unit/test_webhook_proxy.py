"""Webhook proxy: what an HTTP client with redirects reaches through it, and what it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from cog_triton.door.webhook_proxy import WebhookProxy
from cog_triton.door.webhooks import WebhookRules
from cog_triton.system import proxy_variables


class Receiver:
    """A host that takes webhooks, and redirects some to an internal one."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((f"{self.headers['Host']}{self.path}", body))
                moved = self.path.startswith("/moved")
                self.send_response(307 if moved else 200)
                if moved:
                    self.send_header("Location", f"http://internal:{receiver.port}/secret")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def post(url: str, hosts: tuple[str, ...] = ("hooks.example.com",)) -> httpx.Response:
    """POST as Cog does, through a proxy for which every name is this machine."""

    async def main() -> httpx.Response:
        proxy = WebhookProxy(WebhookRules(hosts), lambda host: ["127.0.0.1"])
        port = await proxy.start()
        try:
            async with httpx.AsyncClient(
                proxy=f"http://127.0.0.1:{port}", follow_redirects=True, trust_env=False
            ) as client:
                return await client.post(url, content=b"x" * 100_000)
        finally:
            proxy.close()

    return asyncio.run(main())


def test_an_allowed_host_is_reached(receiver: Receiver) -> None:
    answer = post(f"http://hooks.example.com:{receiver.port}/a?b=c")
    assert answer.status_code == 200
    assert receiver.requests == [(f"hooks.example.com:{receiver.port}/a?b=c", b"x" * 100_000)]


def test_a_redirect_to_a_host_that_is_not_allowed_ends_at_the_proxy(receiver: Receiver) -> None:
    answer = post(f"http://hooks.example.com:{receiver.port}/moved")
    assert answer.status_code == 403
    assert answer.text.startswith("E1005 InvalidArgument: webhook='http://internal:")
    assert len(receiver.requests) == 1


def test_a_name_that_is_public_when_asked_and_private_when_used_is_refused(
    receiver: Receiver,
) -> None:
    assert post(f"http://hooks.example.com:{receiver.port}/a", hosts=()).status_code == 403
    assert receiver.requests == []


def test_tunnels_are_checked_too(receiver: Receiver) -> None:
    with pytest.raises(httpx.ProxyError, match="403"):
        post(f"https://internal:{receiver.port}/a")
    with pytest.raises(httpx.ConnectError):  # reaches the host, which speaks no TLS
        post(f"https://hooks.example.com:{receiver.port}/a")


def test_a_host_that_does_not_listen_is_a_bad_gateway(receiver: Receiver) -> None:
    receiver.close()
    assert post(f"http://hooks.example.com:{receiver.port}/a").status_code == 502
    receiver.__init__()  # type: ignore[misc]


def test_only_cogs_parent_keeps_the_proxy() -> None:
    users = {"PATH": "/bin", "https_proxy": "http://proxy", "NO_PROXY": "*"}
    environment = proxy_variables.with_proxy(users, 99)
    assert {environment[name] for name in ("http_proxy", "HTTPS_PROXY")} == {"http://127.0.0.1:99"}
    assert "NO_PROXY" not in environment
    proxy_variables.restore(environment)
    assert environment == users
    proxy_variables.restore(environment)
    assert environment == users
    assert proxy_variables.has_proxy(users)
    assert not proxy_variables.has_proxy({"https_proxy": "", "NO_PROXY": "*"})
