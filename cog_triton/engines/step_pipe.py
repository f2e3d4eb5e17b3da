"""Requests of the private Triton model ``engine_steps``: an engine's socket, piped through Triton.

The responses of the first one, `OPEN`, carry the bytes that the engine sends, one for each step,
and so do those of each `ARRIVED` that follows; the request before ends then. All others have its
id, and are answered with nothing. `cog_triton.engines.engine_messages` says what the bytes mean.

Triton (24.10) keeps the order of a request's responses, but not that of two requests': a reader
that is behind gets some of the newer one first. So each response begins with its number.
"""

from __future__ import annotations

from collections.abc import Iterator

CALL, BYTES = "call", "bytes"
"""The input and the output, both of type UINT8."""
OPEN, SEND, ARRIVED, CLOSE = b"o", b"s", b"a", b"c"
"""First byte of a call."""
KEY_VARIABLE = "COG_TRITON_STEPS_KEY"
"""Environment variable with what `OPEN` has to name, known to our own processes only."""
MOST_RESPONSES, MOST_BYTES = 512, 4 << 20
"""How far the front end may be behind before the model reads no more from the engine."""
ACK_RESPONSES, ACK_BYTES = 64, 1 << 20
"""After how much the front end sends `ARRIVED`."""
_NUMBER = 8


def numbered(number: int, content: bytes) -> bytes:
    """The content of the response with this number, from 0 on."""
    return number.to_bytes(_NUMBER, "little") + content


class InOrder:
    """What was `numbered`, in the order of the numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}

    def take(self, content: bytes) -> Iterator[bytes]:
        """The engine's bytes that follow those before, once `content` has arrived."""
        self._early[int.from_bytes(content[:_NUMBER], "little")] = content[_NUMBER:]
        while (found := self._early.pop(self._next, None)) is not None:
            self._next += 1
            yield found


def open_call(replica: int, key: str) -> bytes:
    """The call that opens a pipe to the engine `replica`."""
    return OPEN + f"{replica} {key}".encode()


def read_open(call: bytes) -> tuple[int, str]:
    """Replica and key of an `open_call`; raises ValueError for what is none."""
    replica, _, key = call[1:].decode().partition(" ")
    return int(replica), key


def arrived_call(responses: int) -> bytes:
    """The call that says how many responses of the pipe have arrived."""
    return ARRIVED + b"%d" % responses
