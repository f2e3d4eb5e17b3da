"""Webhooks: allowed hosts, and the relay that delivers what coglet posts."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from small_front import run
from webhook_receiver import CERTIFICATE, Receiver, needs_tls

from cog_triton.errors import InvalidArgument
from cog_triton.front import webhook_relay
from cog_triton.front.prediction_body import prepared
from cog_triton.front.webhook_relay import WebhookRelay, WebhookRules, check_webhook
from cog_triton.settings import load_settings

NAMES = {
    "hooks.example.com": ["93.184.216.34", "2606:2800:220:1::1"],
    "intranet": ["10.1.2.3"],
    "localhost": ["127.0.0.1", "::1"],
    "rebound.example.com": ["93.184.216.34", "169.254.169.254"],
    "example.com": ["93.184.216.34"],
}
PUBLIC = WebhookRules()
LOCAL = WebhookRules(loopback=True)


def resolve(host: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        return NAMES.get(host, [])


def refusal(url: str, rules: WebhookRules = PUBLIC) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check_webhook(url, rules, resolve)
    return caught.value.detail


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/a?b=c#d",
        "HTTP://HOOKS.example.com.:8443",
        "https://user:word@hooks.example.com/",
        "http://93.184.216.34/",
        "http://[2606:2800:220:1::1]:80/x",
    ],
)
def test_public_hosts_are_allowed_by_default(url: str) -> None:
    assert check_webhook(url, PUBLIC, resolve)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "[::1]", "[::]", "[fe80::1]"),
        *("[fd00::1]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::1]", "[ff02::1]"),
        *("intranet", "rebound.example.com", "unknown.example.com"),
    ],
)
def test_other_hosts_are_refused_by_default(host: str) -> None:
    assert "its host has no public address" in refusal(f"http://{host}/x")


@pytest.mark.parametrize(
    "url",
    [
        *("", "hooks.example.com", "file:///etc/passwd", "ftp://hooks.example.com/"),
        *("http://", "http:///x", "http://127.0.0.1\\@hooks.example.com/", "http://a b/"),
        *("http://127.0.0.1%2f@x/\n", "http://hooks.example.com\t/", "http://h\u00f6r.de/"),
        *("http://127%2e0.0.1/", "http:/\\127.0.0.1/", "http://hooks.example.com:99999999/"),
    ],
)
def test_what_is_no_plain_http_url_is_refused(url: str) -> None:
    assert refusal(url, WebhookRules(("*",))).endswith("must be an http(s):// URL")


def test_loopback_is_allowed_where_only_this_machine_reaches_cog() -> None:
    assert check_webhook("http://localhost:9/", LOCAL, resolve)
    assert check_webhook("http://127.0.0.1:9/", LOCAL, resolve)
    assert refusal("http://intranet/", LOCAL)
    assert WebhookRules.of(load_settings(cog_host="127.0.0.1")).loopback
    assert WebhookRules.of(load_settings(cog_host="::1")).loopback
    assert not WebhookRules.of(load_settings(cog_host="0.0.0.0")).loopback


def test_only_hosts_of_the_list_are_allowed() -> None:
    rules = WebhookRules.of(load_settings(webhook_hosts="Intranet, *.example.com,192.168.0.0/16"))
    assert check_webhook("http://intranet/", rules, resolve)
    assert check_webhook("http://hooks.example.com/", rules, resolve)
    assert check_webhook("http://192.168.3.4/", rules, resolve)
    assert "must be one of WEBHOOK_HOSTS" in refusal("http://example.com/", rules)
    assert "must be one of WEBHOOK_HOSTS" in refusal("http://93.184.216.34/", rules)
    assert refusal("http://127.0.0.1/", rules)
    everyone, nobody = (WebhookRules.of(load_settings(webhook_hosts=x)) for x in ("*", "none"))
    assert check_webhook("http://127.0.0.1/", everyone, resolve)
    assert refusal("http://hooks.example.com/", nobody)


def test_a_refusal_shows_no_secret_of_the_url() -> None:
    assert "SECRET" not in refusal("http://u:SECRET@127.0.0.1/?key=SECRET")


@pytest.mark.parametrize(
    "body",
    [
        *(b"[", b"[]", b'"a"', b'{"webhook":"\xff"}', b'{"webhook":"x","a":1e999}'),
        *(b'{"webhook":"x","a":NaN}', b'{"webhook":"x","a":"\\ud800"}'),
        b'{"webhook":"x","unknown":' + b"1" * 5000 + b"}",
    ],
)
def test_what_coglet_could_read_otherwise_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="body: "):
        prepared(body, frozenset(), "http://x/")


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
