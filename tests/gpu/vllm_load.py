"""The same load on every way to an engine: requests side by side, each of as many tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

Ask = Callable[[int], Awaitable[float]]


@dataclass(frozen=True)
class Measured:
    """Output tokens a second of all requests together; the median first token, in seconds."""

    tokens_per_second: float
    first_token: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:9.0f} tok/s   TTFT {self.first_token * 1000:7.1f} ms"


def measure(ask: Ask, requests: int, concurrency: int, max_tokens: int) -> Measured:
    """Run `requests` requests, `concurrency` at once; `ask` returns the time of the first token."""

    async def run() -> Measured:
        slots = asyncio.Semaphore(concurrency)

        async def one(number: int) -> float:
            async with slots:
                return await ask(number)

        started = time.perf_counter()
        firsts = await asyncio.gather(*(one(number) for number in range(requests)))
        elapsed = time.perf_counter() - started
        return Measured(requests * max_tokens / elapsed, sorted(firsts)[len(firsts) // 2])

    return asyncio.run(run())


async def post(port: int, path: str, body: dict[str, Any]) -> tuple[float, bytes]:
    """POST, read the whole answer in chunks; seconds to its first event, and its bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    started = time.perf_counter()
    writer.write(head.encode() + content)
    received, first = bytearray(), 0.0
    while chunk := await reader.read(65536):
        received += chunk
        if not first and b"data:" in received:
            first = time.perf_counter() - started
    writer.close()
    if not received.startswith(b"HTTP/1.1 200") or b'"error"' in received:
        raise RuntimeError(received[:1000].decode("utf-8", "replace"))
    return first, bytes(received)
