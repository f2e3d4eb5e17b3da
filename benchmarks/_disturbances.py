"""Clients that could disturb the streams of others, each in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import httpx
from _servers import Server
from _streams import Api

from cog_triton.bench.http_client import Client, encode_request

PROMPT_TOKENS, PROMPT_EVERY_S = 100_000, 1.0
DIRECT_CLIENTS = 64
_BEGUN_S = 60
_LONG = 100_000
"""Tokens of a stream that nobody will see the end of."""
_SMALL = 88
"""Bytes of a receive buffer, and of a segment, which what the sender's system keeps grows with."""

Disturbance = Callable[[Server, Api, Event], None]


def long_prompts(server: Server, api: Api, begun: Event) -> None:
    """A prompt of 100,000 tokens each second, for one token of output."""
    body = api.body({"prompt": " the" * PROMPT_TOKENS, "max_tokens": 1})
    with httpx.Client(timeout=_BEGUN_S) as http:
        while True:
            until = time.monotonic() + PROMPT_EVERY_S
            http.post(f"{server.base(api)}{api.path}", json=body).raise_for_status()
            begun.set()
            time.sleep(max(0.0, until - time.monotonic()))


def direct_clients(server: Server, api: Api, begun: Event) -> None:
    """64 streams of Triton's own API, which ask again once they have ended."""
    prompt = {"input_ids": [500] * 25, "input_lengths": 25}
    body = {**prompt, "request_output_len": 400, "streaming": True}
    url = f"{server.triton}/v2/models/tensorrt_llm/generate_stream"
    origin, request = encode_request("POST", url, {}, json.dumps(body).encode())
    client = Client(timeout=_BEGUN_S)
    answered = itertools.count(1)

    class Sink:
        def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
            if status != 200:
                raise RuntimeError(f"Triton answered HTTP {status}")
            if next(answered) == DIRECT_CLIENTS:
                begun.set()

        def body(self, data: bytes, at: float) -> None:
            pass

    async def ask() -> None:
        while True:
            await client.send(origin, request, Sink())

    async def all_of_them() -> None:
        await asyncio.gather(*(ask() for _ in range(DIRECT_CLIENTS)))

    asyncio.run(all_of_them())


def reads_nothing(server: Server, api: Api, begun: Event) -> None:
    """One stream that nobody reads; buffers between the systems are small, and soon stand full."""
    origin, request = encode_request(
        "POST",
        f"{server.base(api)}{api.path}",
        {"Accept": "text/event-stream"},
        json.dumps(api.body({"max_tokens": _LONG})).encode(),
    )
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        deaf.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL)
        deaf.connect((origin.host, origin.port))
        deaf.sendall(request)
        begun.set()
        while True:
            time.sleep(_BEGUN_S)


@contextmanager
def disturbed(kind: Disturbance | None, server: Server, api: Api) -> Iterator[None]:
    """Within the block `kind` goes on; raises RuntimeError if it did not, or ended before."""
    if kind is None:
        yield
        return
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    child = context.Process(target=kind, args=(server, api, begun), daemon=True)
    child.start()
    try:
        deadline = time.monotonic() + _BEGUN_S
        while not begun.wait(0.1) and child.is_alive() and time.monotonic() < deadline:
            pass
        if begun.is_set():
            yield
        if not child.is_alive() or not begun.is_set():
            raise RuntimeError(f"{kind.__name__}: ended with {child.exitcode}, see above")
    finally:
        child.terminate()
        child.join()
