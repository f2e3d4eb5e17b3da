"""Small requests of the door itself to a server behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_REQUEST = (
    b"%b %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)
_MAX_BYTES = 1 << 20


async def ask(
    port: int,
    method: bytes,
    path: bytes,
    on_connected: Callable[[], None] = lambda: None,
    body: bytes = b"",
) -> tuple[int, bytes]:
    """Status and body of the response of 127.0.0.1:`port` to a request with the JSON `body`.

    Raises OSError where nobody listens, and ValueError if it is cut short.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        on_connected()
        writer.write(_REQUEST % (method, path, len(body), body))
        answer = await reader.read(_MAX_BYTES)
        while more := await reader.read(_MAX_BYTES):
            answer += more
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    head, _, answered = answer.partition(b"\r\n\r\n")
    return int(head[9:12]), answered


async def read_json(
    port: int, path: bytes, on_connected: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The JSON object that a GET of `path` is answered with, of any status; raises as `ask`."""
    _, body = await ask(port, b"GET", path, on_connected)
    value = json.loads(body)
    if not isinstance(value, dict):
        raise ValueError(f"{path.decode()}: not a JSON object")
    return value
