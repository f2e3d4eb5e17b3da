"""Requests of the private Triton model ``engine_steps``: an engine's socket, piped through Triton.

The responses of the first one, `OPEN`, carry the bytes that the engine sends, one for each step,
and so do those of each `ARRIVED` that follows; the request before ends then. All others have its
id, and are answered with nothing. `cog_triton.engines.engine_messages` says what the bytes mean.
"""

from __future__ import annotations

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
