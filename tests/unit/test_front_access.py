"""Who may pass the front: keys, pages that a browser shows, and guesses of keys."""

from __future__ import annotations

from typing import Any

import pytest

from cog_triton.errors import Unauthorized
from cog_triton.front.access import Access, GuessLimit, is_loopback, network_of
from cog_triton.front.message import Refused, Request


def asking(
    method: str = "POST", peer: str = "127.0.0.1", body: bytes = b"{}", **headers: str
) -> Request:
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request(method, b"/", pairs, body, peer=peer)


def passes(access: Access, *arguments: Any, stop: bool = False, **headers: Any) -> bool:
    try:
        asked = asking(*arguments, **headers)
        access.check_stop(asked) if stop else access.check(asked, "openai")
    except (Unauthorized, Refused) as error:
        return "E1007" not in str(error)
    return True


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, True),  # curl -d '{}' sends no type of JSON, and no Origin
        ({"host": "localhost:5000", "content_type": "application/x-www-form-urlencoded"}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "[::1]:5000"}, True),
        ({"host": "192.168.1.7:5000"}, True),
        ({"host": "rebound.example"}, False),
        ({"host": "localhost.example"}, False),
        ({"host": "127.0.0.1.example:5000"}, False),
        ({"host": "a b"}, False),
        ({"origin": "http://localhost:3000", "content_type": "application/json"}, True),
        ({"origin": "http://localhost:3000", "content_type": "text/plain"}, False),
        ({"origin": "http://localhost:3000"}, False),
        ({"origin": "https://page.example", "content_type": "application/json"}, False),
        ({"origin": "null", "content_type": "application/json"}, False),
        ({"origin": "http://[", "content_type": "application/json"}, False),
        ({"sec_fetch_site": "cross-site", "content_type": "application/json"}, False),
        ({"sec_fetch_site": "same-origin", "content_type": "application/json"}, True),
        ({"sec_fetch_site": "same-origin", "content_type": "text/plain"}, False),
    ],
)
def test_without_a_key_no_page_of_another_site_drives_a_local_server(
    headers: dict[str, str], expected: bool
) -> None:
    assert passes(Access(None, loopback=True), **headers) is expected
    assert passes(Access(None, loopback=False), **headers)


@pytest.mark.parametrize(
    ("key", "peer", "headers", "expected"),
    [
        (None, "127.0.0.1", {}, True),
        (None, "::1", {}, True),
        (None, "::ffff:127.0.0.1", {}, True),
        (None, "172.17.0.1", {}, False),
        (None, "", {}, False),
        (None, "127.0.0.1", {"origin": "http://page.example"}, False),
        (None, "127.0.0.1", {"host": "page.example"}, False),
        ("secret", "127.0.0.1", {}, True),
        ("secret", "172.17.0.1", {}, False),
        ("secret", "172.17.0.1", {"authorization": "Bearer secret"}, True),
        ("secret", "127.0.0.1", {"origin": "http://page.example"}, False),
    ],
)
def test_the_server_is_stopped_from_here_or_with_the_key(
    key: str | None, peer: str, headers: dict[str, str], expected: bool
) -> None:
    for loopback in (False, True):
        assert passes(Access(key, loopback), "POST", peer, b"", stop=True, **headers) is expected


def test_addresses_of_this_machine_alone() -> None:
    assert all(is_loopback(name) for name in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(name) for name in ("0.0.0.0", "::", "10.0.0.1", "host", ""))


def tried(limit: GuessLimit, address: str, key: bytes, right: bool) -> bool:
    try:
        limit.check(address, key, right)
    except Refused as refused:
        return (refused.status, refused.error.code) != (429, "E2107")
    return True


def test_guesses_are_limited_and_keys_that_were_used_before_are_not() -> None:
    now = 0.0
    limit = GuessLimit(lambda: now)
    assert tried(limit, "192.0.2.1", b"good", True)
    assert sum(tried(limit, "192.0.2.1", b"%d" % place, False) for place in range(200)) == 60
    assert not tried(limit, "192.0.2.1", b"guessed", True)
    assert tried(limit, "192.0.2.1", b"good", True)
    assert tried(limit, "192.0.2.2", b"guessed", True)
    now = 5.0
    assert sum(tried(limit, "192.0.2.1", b"%d" % place, False) for place in range(200)) == 5


def test_guesses_of_many_addresses_are_limited_together() -> None:
    now = 0.0
    limit = GuessLimit(lambda: now)

    def guessed(addresses: int, each: int = 1, of: int = 10) -> int:
        return sum(
            tried(limit, f"{of}.{place // 65536}.{place // 256 % 256}.{place % 256}", b"x", False)
            for _ in range(each)
            for place in range(addresses)
        )

    assert tried(limit, "192.0.2.1", b"good", True)
    assert guessed(1000, each=20) == 1000  # one each, as 600 are all that there may be at once
    now = 30.0
    assert guessed(1000, each=20) == 600  # 300 of all together, and one a minute of each other
    assert tried(limit, "192.0.2.2", b"new", True)  # an address that has not guessed
    assert not tried(limit, "10.0.0.1", b"new", True)
    now = 60.0
    assert guessed(20_000, of=11) == 4096 - 1000
    assert not tried(limit, "192.0.2.3", b"new", True)  # all places are taken by guessers
    assert tried(limit, "192.0.2.1", b"good", True)
    now = 1000.0
    assert tried(limit, "192.0.2.3", b"new", True)


def test_an_ipv6_network_is_one_guesser() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1")
    assert network_of("") == ""
