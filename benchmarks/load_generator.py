"""CPU cost of an event in the load generator: its own HTTP client beside general ones.

A server in another process sends streams of events at a set rate, each event on its own, as a
served model does. The readers take turns within one run; each counts events and stamps reads.
Prints microseconds of CPU for each event, and ratios to `cog-triton bench`'s own.

    .venv/bin/python benchmarks/load_generator.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import httpx
import uvloop
from _report import Figure, Grid, Report, main

from cog_triton.bench.http_client import Client, now
from cog_triton.bench.options import Options, parse_lengths
from cog_triton.bench.prompt_source import Prompt
from cog_triton.bench.request_record import OK, Record
from cog_triton.bench.targets.cog import CogTarget

EVENT = b'event: output\ndata: {"chunk": " word"}\n\n'
COMPLETED = b'event: completed\ndata: {"status": "succeeded", "metrics": {}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OWN = "cog-triton bench"
Reader = Callable[[str], Awaitable[int]]


def chunk(data: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def serve(connection: Connection, events: int, rate: float) -> None:
    """Child process: answers every POST with `events` at `rate` a second."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"ontent-Length: " in head or b"ontent-length: " in head:
                    size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                    await reader.readexactly(size)
                writer.write(HEAD)
                started = time.monotonic()
                for number in range(events):
                    left = started + number / rate - time.monotonic()
                    await asyncio.sleep(max(0.0, left))
                    writer.write(chunk(EVENT))
                writer.write(chunk(COMPLETED) + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        connection.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


class Canned(CogTarget):
    """`cog-triton bench`'s Cog target, without reading the server's schema."""

    async def prepare(self) -> None:
        self._streamed, self._shortest, self._chats = True, False, False
        self._length, self._fixed = "max_tokens", {}


def own(streams: int) -> Reader:
    """Read with the load generator's own client."""

    async def read(url: str) -> int:
        client = Client(60)
        options = Options(url=url, requests=1, input_lengths=parse_lengths("", "1"))
        target = Canned(options, client)
        await target.prepare()
        records = [Record(index=number, scheduled=now()) for number in range(streams)]
        prompt = Prompt("x", (), 1)
        await asyncio.gather(*(target.measure(prompt, record) for record in records))
        client.close()
        assert all(record.status == OK for record in records), records[0].error
        return sum(record.pieces for record in records)

    return read


def asyncio_streams(streams: int) -> Reader:
    """Read with asyncio's StreamReader, by line, without an HTTP parser."""

    async def one(url: str) -> int:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /predictions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        count, times = 0, []
        while (line := await reader.readline()) != b"0\r\n":
            if line.startswith(b"event: output"):
                count += 1
                times.append(time.monotonic())
        writer.close()
        return count

    async def read(url: str) -> int:
        return sum(await asyncio.gather(*(one(url) for _ in range(streams))))

    return read


def with_httpx(streams: int, *, lines: bool) -> Reader:
    """Read with httpx, as the original's script and most others do."""

    async def one(http: httpx.AsyncClient, url: str) -> int:
        count, times = 0, []
        async with http.stream("POST", f"{url}/predictions", json={}) as response:
            if lines:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        json.loads(line[6:])
                        times.append(time.monotonic())
                        count += 1
                return count - 1
            async for data in response.aiter_bytes():
                times.append(time.monotonic())
                count += data.count(b"event: output")
        return count

    async def read(url: str) -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as http:
            return sum(await asyncio.gather(*(one(http, url) for _ in range(streams))))

    return read


def run(args: argparse.Namespace) -> Report:
    """Measure every reader, in turns."""
    if args.quick:
        args.streams, args.events, args.rounds = 4, 10, 1
    readers = {
        OWN: own(args.streams),
        "asyncio streams, by line": asyncio_streams(args.streams),
        "httpx, by chunk": with_httpx(args.streams, lines=False),
        "httpx, by line, JSON": with_httpx(args.streams, lines=True),
    }
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, args.events, args.rate), daemon=True
    )
    child.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    costs: dict[str, list[float]] = {name: [] for name in readers}
    try:
        for _ in range(args.rounds):
            for name, read in readers.items():
                before = time.process_time()
                runs = uvloop.run if name == OWN else asyncio.run
                count: int = runs(read(url))  # type: ignore[arg-type]
                assert count == args.streams * args.events, (name, count)
                costs[name].append((time.process_time() - before) / count * 1e6)
    finally:
        child.terminate()
        child.join()
    report = Report("load_generator", "what an event costs the load generator")
    title = f"{args.streams} streams, {args.rate:g} events/s each"
    grid = Grid(title, ("reader", "us of CPU an event", "ratio"))
    base = statistics.median(costs[OWN])
    for name, found in costs.items():
        cost = statistics.median(found)
        grid.add(name, f"{cost:.1f}", f"{cost / base:.2f}")
        if name != OWN:
            report.figures.append(Figure(f"CPU an event: {name} / cog-triton bench", cost / base))
    report.grids.append(grid)
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--events", type=int, default=200, help="of each stream")
    parser.add_argument("--rate", type=float, default=50, help="events a second of each stream")
    parser.add_argument("--rounds", type=int, default=3)


if __name__ == "__main__":
    main("load_generator", __doc__, run, arguments)
