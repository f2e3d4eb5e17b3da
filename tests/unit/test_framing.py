"""Frames between processes: round trips and bounds."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.ipc import framing
from cog_triton.ipc.framing import FrameDecoder, FrameError

payloads = st.lists(st.binary(max_size=300), max_size=8)


@given(payloads, st.lists(st.integers(1, 64), min_size=1))
def test_a_decoder_gives_back_what_was_framed_however_it_arrives(
    sent: list[bytes], pieces: list[int]
) -> None:
    content = b"".join(map(framing.frame, sent))
    decoder, got, at, turn = FrameDecoder(), [], 0, 0
    while at < len(content):
        size = pieces[turn % len(pieces)]
        got += decoder.feed(content[at : at + size])
        at, turn = at + size, turn + 1
    assert got == sent


def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    head = struct.pack("!I", 11)
    with pytest.raises(FrameError, match="11 bytes; 10 at most"):
        FrameDecoder(10).feed(head)
