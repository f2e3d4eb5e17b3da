"""Webhooks: hosts that are allowed, with a resolver of the tests; what coglet is told of them."""

from __future__ import annotations

import ipaddress

import pytest

from cog_triton.errors import InvalidArgument
from cog_triton.front.prediction_body import prepared
from cog_triton.front.webhook_relay import WebhookRules, check_webhook
from cog_triton.serving.coglet import cog_server
from cog_triton.settings import load_settings
from cog_triton.system.public_addresses import resolve_host

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


def test_what_is_no_text_is_no_url() -> None:
    with pytest.raises(InvalidArgument, match=r"webhook: must be an http\(s\):// URL"):
        prepared(b'{"webhook": 1}', frozenset(), "http://b/")


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


def test_addresses_in_other_notations_are_resolved_before_they_are_judged() -> None:
    for host in ("2130706433", "0x7f.1", "127.1"):
        with pytest.raises(InvalidArgument):
            check_webhook(f"http://{host}/", PUBLIC, resolve_host)


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


@pytest.mark.parametrize(
    ("users", "direct"),
    [
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "a,b"}, "a,b,127.0.0.1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,127.0.0.1"),
        ({"no_proxy": "*"}, "*"),
        ({"no_proxy": "*.a"}, "*.a,127.0.0.1"),
    ],
)
def test_coglet_reaches_the_relay_without_a_proxy(users: dict[str, str], direct: str) -> None:
    given = {"http_proxy": "http://proxy", **users}
    made = cog_server.environment(given)
    assert made.items() >= {**given, "no_proxy": direct, "NO_PROXY": direct}.items()
