"""Frames between processes: round trips, bounds and hang-ups."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.ipc import framing
from cog_triton.ipc.framing import FrameDecoder, FrameError, FrameSocket

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


@given(payloads)
def test_a_socket_reads_what_the_other_writes(sent: list[bytes]) -> None:
    ours, theirs = map(FrameSocket, socket.socketpair())
    for payload in sent:
        theirs.send(payload)
    assert [ours.receive() for _ in sent] == sent
    assert not ours.poll()
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    head = struct.pack("!I", 11)
    with pytest.raises(FrameError, match="11 bytes; 10 at most"):
        FrameDecoder(10).feed(head)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(head)
        with pytest.raises(FrameError):
            FrameSocket(ours, 10).receive()


def test_a_hang_up_ends_a_receive_on_either_side() -> None:
    ours, theirs = map(FrameSocket, socket.socketpair())
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EOFError):
            ours.receive()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    theirs.socket.sendall(struct.pack("!I", 5) + b"four")  # within a frame
    theirs.close()
    thread.join()
    assert ended.is_set()
    assert ours.poll()
    ours.close()
