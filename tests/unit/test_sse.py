"""SSE: events come out whole and in order however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.text.sse import EventSplitter, event_data, event_name

LINES = st.text('ab{}":, ü日\U0001f600', min_size=1).map(lambda text: f"data: x{text}x".encode())
EVENTS = st.lists(st.lists(LINES, min_size=1, max_size=3).map(b"\n".join))
CUTS = st.sets(st.integers(0, 10**4))


def feed(stream: bytes, cuts: set[int]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    found = [event for a, b in pairwise(places) for event in splitter.feed(stream[a:b])]
    return found, splitter.rest


@given(EVENTS, CUTS, st.binary().filter(lambda data: not set(data) & set(b"\r\n")))
def test_any_chunking_gives_the_same_events(
    events: list[bytes], cuts: set[int], tail: bytes
) -> None:
    stream = b"".join(event + b"\n\n" for event in events) + tail
    assert feed(stream, cuts) == (events, tail)


@given(EVENTS, CUTS)
def test_lines_may_end_in_crlf(events: list[bytes], cuts: set[int]) -> None:
    stream = b"".join(event.replace(b"\n", b"\r\n") + b"\r\n\r\n" for event in events)
    found, rest = feed(stream, cuts)
    assert found == events
    assert not rest.strip()


@pytest.mark.parametrize(
    ("stream", "parts"),
    [
        (b"data: a\n\n", [(b"", b"a")]),
        (b"data:a\n\n", [(b"", b"a")]),
        (b"data:  a \n\n", [(b"", b" a ")]),
        (b"id: 3\nevent: token\ndata: a\n\n", [(b"token", b"a")]),
        (b"event:token\n\n", [(b"token", b"")]),
        (b"data: a\ndata: event: b\n\n", [(b"", b"a\nevent: b")]),
        (b": a comment that keeps the connection open\n\n", [(b"", b"")]),
        (b"retry: 5\n\n", [(b"", b"")]),
        (b"\n\n", [(b"", b"")]),
        (b"data: a\n\n\n\ndata: b\n\n", [(b"", b"a"), (b"", b""), (b"", b"b")]),
    ],
)
def test_name_and_data_of_events(stream: bytes, parts: list[tuple[bytes, bytes]]) -> None:
    splitter = EventSplitter()
    found = splitter.feed(stream)
    assert [(event_name(event), event_data(event)) for event in found] == parts
    assert splitter.rest == b""


def test_an_event_is_given_out_when_its_blank_line_arrives() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.rest == b"data: a\n"
    assert splitter.feed(b"\nda") == [b"data: a"]
    assert splitter.rest == b"da"
