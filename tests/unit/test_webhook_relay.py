"""Webhook relay: order, pace, retries and addresses of what coglet posts to the front."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_front import run
from webhook_receiver import CERTIFICATE, Receiver, by_http_and_https, needs_tls

from cog_triton.errors import TritonUnknownError
from cog_triton.front import webhook_relay
from cog_triton.front.prediction_body import prepared
from cog_triton.front.webhook_relay import WebhookRelay, WebhookRules

HOST = "hooks.example.com"
OTHER = "else.example.com"
DONE = {"id": "p", "logs": "", "metrics": {}, "output": ["a"] * 9, "status": "succeeded"}


def event(tokens: int, status: str = "processing") -> dict[str, Any]:
    """What coglet says of a prediction with so many tokens of output."""
    output = {"output": ["a"] * tokens} if tokens else {}
    return {"id": "p", "logs": "", "metrics": {}, **output, "status": status}


def encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Coglet:
    """Posts events as coglet does, each at once."""

    def __init__(self, relay: WebhookRelay, client: httpx.AsyncClient) -> None:
        self.relay = relay
        self._client = client

    async def address(self, url: str) -> str:
        """Of the relay, for a prediction with this webhook."""
        await self.relay.expect(url)
        found = prepared(encoded({"webhook": url}), frozenset(), self.relay.address())
        return str(json.loads(found.body)["webhook"])

    async def post(self, address: str, *events: dict[str, Any]) -> list[int]:
        headers = {"authorization": "Bearer word", "user-agent": "coglet/0"}
        sent = [{"content": encoded(each), "headers": headers} for each in events]
        return [(await self._client.post(address, **each)).status_code for each in sent]


def relay_to(
    scenario: Callable[[Coglet], Awaitable[None]],
    rules: tuple[Any, ...] = ((HOST, OTHER),),
    seconds: float = 60.0,
    resolve: Callable[[str], list[str]] = lambda _: ["127.0.0.1"],
) -> bool:
    """Run a scenario before a relay; whether all was delivered."""

    async def main() -> bool:
        relay = WebhookRelay(WebhookRules(*rules), resolve)
        relay.start()
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                await scenario(Coglet(relay, client))
            end = time.monotonic() + seconds
            await relay.drained(lambda: time.monotonic() < end)
            return not relay.pending
        finally:
            await relay.close()

    return run(main())


def deliver(
    receiver: Receiver, *events: dict[str, Any], path: str = "/a", name: str = HOST, **relay: Any
) -> bool:
    """Whether events of one prediction were delivered."""

    async def scenario(coglet: Coglet) -> None:
        url = f"{receiver.scheme}://{name}:{receiver.port}{path}"
        address = await coglet.address(url)
        assert set(await coglet.post(address, *events)) == {200}

    return relay_to(scenario, **relay)


def tokens(receiver: Receiver) -> list[int]:
    return [len(each.get("output", [])) for each in receiver.events]


@by_http_and_https
def test_the_end_is_retried(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tls:
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    statuses = [500, 0, 429, 200]
    with Receiver(lambda _, count: (statuses[count], {}), tls=tls) as receiver:
        assert deliver(receiver, DONE)
    assert receiver.events == [DONE] * 4


@contextmanager
def hanging() -> Iterator[tuple[Receiver, threading.Event]]:
    """A receiver that answers once the event has come."""
    free = threading.Event()
    with Receiver(lambda *_: (200 * free.wait(60), {})) as receiver:
        try:
            yield receiver, free
        finally:
            free.set()


def test_a_receiver_that_hangs_holds_up_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_relay, "_TIMEOUT_S", 600.0)

    with hanging() as (hung, free), Receiver() as other:

        async def scenario(coglet: Coglet) -> None:
            first = await coglet.address(f"http://{HOST}:{hung.port}/")
            await coglet.post(first, event(0), DONE)
            second = await coglet.address(f"http://{HOST}:{other.port}/")
            await coglet.post(second, event(0), DONE)
            while len(other.events) < 2:
                await asyncio.sleep(0.01)
            assert coglet.relay.pending
            free.set()

        assert relay_to(scenario)
        assert hung.events == [event(0), DONE]


def test_redirects_are_followed_where_they_may_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_relay, "_RETRIES", 0)

    def moved(path: str, _count: int) -> tuple[int, dict[str, str]]:
        hosts = {"/a": f"http://{HOST}:{receiver.port}/b", "/loop": "/loop", "/bad": "http://[::1"}
        hosts["/inside"] = f"http://internal:{receiver.port}/secret"
        return (307, {"Location": hosts[path]}) if path in hosts else (200, {})

    with Receiver(moved) as receiver:
        assert deliver(receiver, DONE)
        assert receiver.paths == ["/a", "/b"]
        for path, count in (("/inside", 1), ("/loop", 11), ("/bad", 1)):
            receiver.paths.clear()
            assert deliver(receiver, DONE, path=path)
            assert receiver.paths == [path] * count


def test_cookies_of_receivers_are_not_kept() -> None:
    def answer(path: str, _count: int) -> tuple[int, dict[str, str]]:
        moved = {"Location": f"http://{HOST}:{receiver.port}/b"}
        cookie = {"Set-Cookie": "tenant=SECRET; Path=/"}
        return (307, {**moved, **cookie}) if path == "/moved" else (200, cookie)

    async def scenario(coglet: Coglet) -> None:
        for count, path in enumerate(("a", "a", "moved")):
            address = await coglet.address(f"http://{HOST}:{receiver.port}/{path}")
            assert await coglet.post(address, DONE) == [200]
            while len(receiver.events) <= count:
                await asyncio.sleep(0.01)

    with Receiver(answer) as receiver:
        assert relay_to(scenario)
    assert receiver.paths == ["/a", "/a", "/moved", "/b"]
    assert [headers.get("cookie") for headers in receiver.headers] == [None] * 4


def test_a_name_that_is_private_when_it_is_used_is_refused(caplog: Any) -> None:
    answers = iter([["93.184.216.34"]])
    with Receiver() as receiver:
        assert deliver(receiver, DONE, rules=(), resolve=lambda _: next(answers, ["127.0.0.1"]))
        assert receiver.events == []
    assert "its host has no public address" in caplog.text


@needs_tls
def test_certificates_are_verified(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook_relay, "_RETRIES", 0)
    with Receiver(tls=True) as receiver:
        deliver(receiver, DONE)
        assert receiver.events == []
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        caplog.clear()
        deliver(receiver, DONE, name=OTHER)
        assert receiver.events == []
        deliver(receiver, DONE)
        assert receiver.events == [DONE]


def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        assert deliver(proxy, DONE)
        monkeypatch.setenv("no_proxy", HOST)
        assert deliver(proxy, DONE)
    assert proxy.paths == [f"http://{HOST}:{proxy.port}/a", "/a"]


def test_only_who_knows_the_address_posts() -> None:
    with Receiver() as receiver:

        async def scenario(coglet: Coglet) -> None:
            address = await coglet.address(f"http://{HOST}:{receiver.port}/")
            start, _, rest = address.removeprefix("http://").partition("/")
            key, _, rest = rest.partition("/")
            assert await coglet.post(f"http://{start}/{'0' * len(key)}/{rest}", DONE) == [404]
            assert await coglet.post(f"http://{start}/", DONE) == [404]

        assert relay_to(scenario)
        assert receiver.events == []


def test_what_a_stop_leaves_undelivered_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with Receiver(lambda *_: (503, {})) as receiver:
        assert not deliver(receiver, DONE, seconds=0.5)
    assert f"webhook 'http://{HOST}:{receiver.port}/a': the end is not delivered" in caplog.text


def test_receivers_that_are_gone_take_their_share_of_memory_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook_relay, "_MOST_FAILING", 2)

    async def scenario(coglet: Coglet) -> None:
        for name in range(5):
            address = await coglet.address(f"http://{HOST}:{gone.port}/{name}")
            await coglet.post(address, DONE)
        while caplog.text.count("too many others") < 3:
            await asyncio.sleep(0.02)
        address = await coglet.address(f"http://{HOST}:{receiver.port}/")
        await coglet.post(address, DONE)
        while not receiver.events:
            await asyncio.sleep(0.02)
        assert coglet.relay.pending == 2

    with Receiver(lambda *_: (500, {})) as gone, Receiver() as receiver:
        assert not relay_to(scenario, seconds=0.1)


def test_more_deliveries_than_may_be_are_coglets_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_relay, "_MOST", 1)

    async def scenario(coglet: Coglet) -> None:
        first = await coglet.address(f"http://{HOST}:{receiver.port}/")
        second = await coglet.address(f"http://{HOST}:{receiver.port}/")
        assert await coglet.post(first, event(0)) == [200]
        assert await coglet.post(second, DONE) == [503]
        assert await coglet.post(first, DONE) == [200]
        while coglet.relay.pending:
            await asyncio.sleep(0.02)
        assert await coglet.post(second, DONE) == [200]

    with Receiver() as receiver:
        assert relay_to(scenario)
    assert receiver.events == [event(0), DONE, DONE]


def test_what_all_deliveries_hold_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a receiver that accepts and never answers: what is on its way counts, too."""
    monkeypatch.setattr(webhook_relay, "_MOST_HELD_BYTES", 5000)

    def large(tokens: int, size: int = 900, status: str = "processing") -> dict[str, Any]:
        return {**event(tokens, status), "logs": "x" * size}

    async def scenario(coglet: Coglet) -> None:
        first, second, third = [
            await coglet.address(f"http://{HOST}:{receiver.port}/{name}") for name in "abc"
        ]
        for address in (first, second):
            assert await coglet.post(address, large(0)) == [200]
        while len(receiver.events) < 2:  # on their way
            await asyncio.sleep(0.01)
        assert await coglet.post(first, large(1)) == [200]
        assert await coglet.post(second, large(2)) == [200]
        assert "an event is left out" not in caplog.text
        assert await coglet.post(first, large(3, 1900, "succeeded")) == [200]
        assert caplog.text.count("an event is left out") == 1
        assert await coglet.post(third, large(4, 1900)) == [503]
        free.set()
        while coglet.relay.pending:
            await asyncio.sleep(0.01)
        assert await coglet.post(third, large(5, status="failed")) == [200]

    with hanging() as (receiver, free):
        assert relay_to(scenario)
    assert sorted(tokens(receiver)) == [0, 0, 3, 5]


@pytest.mark.parametrize("made", [False, True])
def test_certificates_that_cannot_be_read_are_a_coded_error(
    made: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "certificates.pem"
    if made:
        file.write_text("none")
    monkeypatch.setenv("SSL_CERT_FILE", str(file))

    async def scenario(coglet: Coglet) -> None:
        for _ in range(2):
            with pytest.raises(TritonUnknownError, match="webhooks cannot be sent: SSL_CERT_FILE:"):
                await coglet.relay.expect(f"http://{HOST}/")
        monkeypatch.delenv("SSL_CERT_FILE")
        await coglet.relay.expect(f"http://{HOST}/")

    assert relay_to(scenario)


def test_an_end_after_a_long_silence_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_relay, "_FORGOTTEN_S", 0.1)

    async def scenario(coglet: Coglet) -> None:
        address = await coglet.address(f"http://{HOST}:{receiver.port}/")
        await coglet.post(address, event(0))
        await asyncio.sleep(1)
        await coglet.post(address, DONE)

    with Receiver() as receiver:
        assert relay_to(scenario)
    assert receiver.events == [event(0), DONE]
