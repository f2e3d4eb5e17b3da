"""HTTP exchange sans IO: any cut of the bytes gives the same payloads, or the same error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import event, stream, whole

from cog_triton.triton.triton_connections import ExchangeBroken, ResponseParser, request_bytes

CUTS = st.lists(st.integers(1, 60), max_size=60)
EVENTS = [event(output_ids=[1, 2], name="ü"), b": comment\n\n", event(output_ids=3)]
PAYLOADS = [event_bytes.removeprefix(b"data: ").strip() for event_bytes in EVENTS[::2]]


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` cut into pieces of these sizes, and the rest."""
    found = []
    for size in sizes:
        found.append(data[:size])
        data = data[size:]
    return [piece for piece in (*found, data) if piece]


def fed(data: bytes, sizes: list[int]) -> tuple[ResponseParser, list[bytes]]:
    parser = ResponseParser()
    payloads = [payload for piece in pieces(data, sizes) for payload in parser.feed(piece)]
    return parser, payloads


def chunked(*parts: bytes, end: bool = True) -> bytes:
    return b"".join(part for part in stream(*parts, end=end) if isinstance(part, bytes))


@given(CUTS)
def test_a_chunked_event_stream_survives_any_cut(sizes: list[int]) -> None:
    parser, payloads = fed(chunked(*EVENTS), sizes)
    assert payloads == PAYLOADS
    assert (parser.status, parser.complete, parser.reusable, parser.body) == (200, True, True, b"")


@given(CUTS)
def test_an_event_stream_with_a_length_survives_any_cut(sizes: list[int]) -> None:
    body = b"".join(EVENTS).replace(b"\n", b"\r\n")
    parser, payloads = fed(whole(body, kind="text/event-stream; charset=utf-8"), sizes)
    assert payloads == PAYLOADS
    assert (parser.complete, parser.body) == (True, b"")


@given(CUTS, st.binary(max_size=200))
def test_a_body_survives_any_cut(sizes: list[int], body: bytes) -> None:
    parser, payloads = fed(whole(body, "400 Bad Request"), sizes)
    assert payloads == parser.feed(b"") == [], "nor is the end an error then"
    assert (parser.status, parser.complete, parser.body) == (400, True, body)


def test_body_is_what_has_arrived() -> None:
    parser = ResponseParser()
    assert (parser.status, parser.body, parser.complete) == (0, b"", False)
    assert parser.feed(whole(b"12345")[:-2]) == []
    assert (parser.status, parser.body, parser.complete) == (200, b"123", False)


def test_body_of_a_stream_that_ends_inside_an_event_is_the_rest() -> None:
    parser, payloads = fed(chunked(*EVENTS, b"data: {"), [])
    assert payloads == PAYLOADS
    assert (parser.complete, parser.body) == (True, b"data: {")


def test_payloads_are_given_once() -> None:
    parser = ResponseParser()
    head, first, second, end = stream(EVENTS[0], EVENTS[2])
    assert parser.feed(head) == []  # type: ignore[arg-type]
    assert parser.feed(first) == PAYLOADS[:1]  # type: ignore[arg-type]
    assert parser.feed(second) == PAYLOADS[1:]  # type: ignore[arg-type]
    assert parser.feed(end) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
    ],
)
def test_only_a_connection_that_stays_open_is_reusable(head: bytes, reusable: bool) -> None:
    parser = ResponseParser()
    parser.feed(head + b"Content-Length: 2\r\n\r\nab")
    assert (parser.complete, parser.reusable) == (True, reusable)


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\x00\x01\x02\x03",
        chunked(end=False) + b"not a size\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        whole(b"") + b"what was not asked for",
    ],
)
def test_what_is_not_http_is_refused(garbage: bytes) -> None:
    with pytest.raises(ExchangeBroken, match="not HTTP"):
        ResponseParser().feed(garbage)


@pytest.mark.parametrize("complete", [whole(b"12345"), chunked(*EVENTS)])
def test_an_early_end_is_refused_wherever_it_comes(complete: bytes) -> None:
    for size in range(len(complete)):
        parser = ResponseParser()
        parser.feed(complete[:size]) if size else None
        assert not parser.complete
        with pytest.raises(ExchangeBroken, match="ended early"):
            parser.feed(b"")


@pytest.mark.parametrize(("keep", "connection"), [(False, "close"), (True, "keep-alive")])
def test_request_is_a_post_of_json(keep: bool, connection: str) -> None:
    body = json.dumps({"name": "ü"}).encode()
    head, _, sent = request_bytes("[::1]:80", "/v2/x", body, keep=keep).partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert first == "POST /v2/x HTTP/1.1"
    assert set(headers) == {
        "Host: [::1]:80",
        f"Connection: {connection}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    }
    assert sent == body
