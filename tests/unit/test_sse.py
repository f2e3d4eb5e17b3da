"""Events come out whole and in order however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.triton.sse import EventBuffer

PAYLOADS = st.lists(st.text('ab{}":, ü日\U0001f600', min_size=1).map(lambda t: f"x{t}x".encode()))


def feed(stream: bytes, cuts: set[int]) -> tuple[list[bytes], bytes]:
    buffer = EventBuffer()
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    found = [p for a, b in pairwise(places) for p in buffer.feed(stream[a:b])]
    return found, buffer.rest


@given(PAYLOADS, st.sets(st.integers(0, 10**4)), st.binary().filter(lambda b: b"\n" not in b))
def test_any_chunking_gives_the_same_events(
    payloads: list[bytes], cuts: set[int], tail: bytes
) -> None:
    tail = tail.replace(b"\r", b"")
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads) + tail
    assert feed(stream, cuts) == (payloads, tail)


@given(PAYLOADS, st.sets(st.integers(0, 10**4)))
def test_crlf_is_a_line_end_too(payloads: list[bytes], cuts: set[int]) -> None:
    stream = b"".join(b"data: " + payload + b"\r\n\r\n" for payload in payloads)
    found, rest = feed(stream, cuts)
    assert found == payloads
    assert not rest.strip()


@pytest.mark.parametrize(
    ("event", "payloads"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"id: 3\nevent: token\ndata: a\n\n", [b"a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": a comment that keeps the connection open\n\n", []),
        (b"retry: 5\n\n", []),
        (b"\n\n", []),
        (b"data: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
    ],
)
def test_what_else_an_event_may_hold(event: bytes, payloads: list[bytes]) -> None:
    buffer = EventBuffer()
    assert buffer.feed(event) == payloads
    assert buffer.rest == b""


def test_nothing_arrives_before_its_event_ends() -> None:
    buffer = EventBuffer()
    assert buffer.feed(b"data: a\n") == []
    assert buffer.rest == b"data: a\n"
    assert buffer.feed(b"\nda") == [b"a"]
    assert buffer.rest == b"da"
