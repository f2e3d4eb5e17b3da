"""Who may pass the front: keys, and pages that a browser shows."""

from __future__ import annotations

from typing import Any

import pytest

from cog_triton.errors import Unauthorized
from cog_triton.front.access import Access, is_loopback
from cog_triton.front.message import Refused, Request


def request(
    method: str = "POST", peer: str = "127.0.0.1", body: bytes = b"{}", **headers: str
) -> Request:
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request(method, b"/", pairs, body, peer=peer)


def passes(access: Access, *arguments: Any, stop: bool = False, **headers: Any) -> bool:
    try:
        asked = request(*arguments, **headers)
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
