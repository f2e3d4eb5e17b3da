"""Requests of the private Triton model ``engine_steps``: an engine's socket, piped through Triton.

The first one, `OPEN`, is endless: its responses carry the bytes that the engine sends, one response
for each step. All others have its id, and are answered with nothing: bytes for the engine, or how
much has arrived. What the bytes mean is said by `cog_triton.engines.engine_messages`.
"""

from __future__ import annotations

import struct

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

_REPLICA = struct.Struct("<I")
_COUNT = struct.Struct("<Q")


def open_call(replica: int, key: str) -> bytes:
    """The call that opens a pipe to the engine `replica`."""
    return OPEN + _REPLICA.pack(replica) + key.encode()


def read_open(call: bytes) -> tuple[int, str]:
    """Replica and key of an `open_call`; raises ValueError for what is none."""
    try:
        (replica,) = _REPLICA.unpack_from(call, 1)
        return replica, call[1 + _REPLICA.size :].decode()
    except struct.error as error:
        raise ValueError(str(error)) from error


def arrived_call(responses: int) -> bytes:
    """The call that says how many responses of the pipe have arrived."""
    return ARRIVED + _COUNT.pack(responses)


def read_arrived(call: bytes) -> int:
    """The number of an `arrived_call`; raises ValueError."""
    try:
        (count,) = _COUNT.unpack_from(call, 1)
    except struct.error as error:
        raise ValueError(str(error)) from error
    return int(count)
