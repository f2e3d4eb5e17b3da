"""Cancellations in the first 5 ms of a prediction: each ends it, before Cog knows of it, too."""

import asyncio
import json
import random
import re
import socket
import struct
from collections import Counter
from typing import Any

import pytest
from stack import Stack, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]
COUNT, AT_ONCE, FIRST_S = 400, 16, 0.005
ENDLESS = {"input": {"prompt": "a", "max_tokens": 100_000}}
HEAD = (
    "{} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    "{}Content-Length: {}\r\n\r\n"
)


async def ask(port: int, line: str, more: str = "") -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(ENDLESS)
    writer.write((HEAD.format(line, more, len(body)) + body).encode())
    return reader, writer


async def answer(reader: asyncio.StreamReader, writer: Any) -> bytes:
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    return data


async def cancel(port: int, number: int, statuses: Counter[object]) -> None:
    """By POST, or by leaving; of one that the client waits for, streams, or only begins."""
    kind, name = number % 4, f"early-{number}"
    more = ("Accept: text/event-stream\r\n", "", "Prefer: respond-async\r\n", "")[kind]
    line = f"PUT /predictions/{name}" if kind < 3 else "POST /predictions"
    reader, writer = await ask(port, line, more)
    await asyncio.sleep(random.random() * FIRST_S)
    if kind % 2:  # by a reset: one that only ends its half may await the answer
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return
    if kind == 2:  # its answer comes once Cog knows of it
        statuses[int((await answer(reader, writer))[9:12])] += 1
    cancelled = await answer(*await ask(port, f"POST /predictions/{name}/cancel"))
    statuses[int(cancelled[9:12])] += 1
    if kind == 0:
        found = re.search(rb'"status":"(\w+)"}\n\n\r\n0', await answer(reader, writer))
        statuses[found and found[1].decode()] += 1


async def cancel_all(port: int) -> Counter[object]:
    statuses: Counter[object] = Counter()
    for first in range(0, COUNT, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, COUNT))
        await asyncio.gather(*(cancel(port, number, statuses) for number in numbers))
    return statuses


def test_early_cancellations_end_every_prediction(mock: Stack) -> None:
    statuses = asyncio.run(cancel_all(mock.port))
    assert statuses == {200: COUNT // 2, 202: COUNT // 4, "canceled": COUNT // 4}
    wait_until(lambda: not mock.requests())
