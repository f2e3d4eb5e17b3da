"""Messages between processes of one user, in asyncio: pickles, framed as in `multiprocessing`.

The peer may use `multiprocessing.connection.Connection`: a message follows its length in four
bytes.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("!i")


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message; raises EOFError when the peer is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queue a message, without waiting; nothing is sent to a peer that is gone."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(content)) + content)
