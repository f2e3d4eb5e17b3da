"""Load of the benchmarks: concurrent users of one API, by the client of `cog-triton bench`."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from _servers import PREDICTIONS, Api

from cog_triton.bench.http_client import BufferedResponse, Client, Connection, Origin, now
from cog_triton.bench.load_generator import GeneratorUsage
from cog_triton.bench.options import Lengths, Options, Prompt
from cog_triton.bench.request_record import OK, Record
from cog_triton.bench.targets import KINDS

PROMPT = "Tell me about the sea."
_TIMEOUT_S = 300.0
BUSY = 0.85
"""A client that uses more of a core than this is itself what is measured."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Streams that ran concurrently; `load` is the client's own CPU and lag."""

    streams: list[Record]
    load: GeneratorUsage

    @property
    def tokens(self) -> int:
        """Output tokens of all streams."""
        return sum(stream.output_tokens or 0 for stream in self.streams)

    @property
    def events(self) -> int:
        """Events of output, of all streams: a server that is behind has several tokens in one."""
        return sum(stream.pieces for stream in self.streams)

    def itl_ms(self, percentile: float = 99) -> float:
        """Inter-token latency within a stream, in milliseconds."""
        gaps = [gap for stream in self.streams for gap in stream.gaps()]
        return float(np.percentile(gaps, percentile)) * 1000 if gaps else 0.0

    def ttft_ms(self, percentile: float = 50) -> float:
        """Time to first token from sending, in milliseconds."""
        times = [stream.ttft_sent or 0.0 for stream in self.streams]
        return float(np.percentile(times, percentile)) * 1000

    @property
    def client_busy(self) -> float:
        """Share of a core that the client used."""
        return self.load.cpu / self.load.wall


class QuickAckConnection(Connection):
    """Connection that acknowledges each read at once (TCP_QUICKACK).

    Cog by itself leaves Nagle's algorithm on: it holds back a small write until the one before is
    acknowledged, which Linux delays by 40 ms on a connection that has been in use for a while.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        super().data_received(data)


class QuickAckClient(Client):
    """Client with a new, quickly acknowledging connection for each request."""

    async def send(self, origin: Origin, request: bytes, sink: BufferedResponse) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(QuickAckConnection, origin.host, origin.port)
        try:
            await connection.exchange(request, sink, self.timeout)
        finally:
            connection.close()


def wave(
    url: str,
    inputs: Mapping[str, Any],
    streams: int,
    seconds: float = 0.0,
    *,
    api: Api = PREDICTIONS,
    model: str | None = None,
) -> Wave:
    """Run requests of `inputs` by `streams` concurrent users, all starting at once.

    Each user asks again once answered, until `seconds` have passed; by default asks once.
    Raises RuntimeError for a request that did not succeed.
    """
    rest = dict(inputs)
    prompt = Prompt(rest.pop("prompt", PROMPT), (), rest.pop("max_tokens", 128))
    one = Lengths("1", 1, 1)
    options = Options(
        url=url,
        target=api.target,
        requests=1,
        input_lengths=one,
        output_lengths=one,
        model=model,
        inputs=rest,
    )
    return asyncio.run(_wave(options, prompt, streams, seconds))


async def _wave(options: Options, prompt: Prompt, streams: int, seconds: float) -> Wave:
    done: list[Record] = []
    usage = GeneratorUsage()
    target = KINDS[options.target](options, QuickAckClient(_TIMEOUT_S))
    await target.prepare()

    async def user(until: float) -> None:
        while True:
            record = Record(index=len(done), scheduled=now())
            await target.measure(prompt, record)
            if record.status != OK:
                raise RuntimeError(f"{record.code}: {record.error}")
            done.append(record)
            if record.ended >= until:
                return

    gc.collect()
    gc.disable()  # it would pause the client during reads
    try:
        usage.start()
        started = now()
        await asyncio.gather(*(user(started + seconds) for _ in range(streams)))
    finally:
        usage.stop()
        gc.enable()
    return Wave(done, usage)


def busy_notes(waves: Mapping[str, Wave]) -> Iterator[str]:
    """A note for each wave in which the client was the bottleneck."""
    for name, item in waves.items():
        if item.client_busy > BUSY:
            yield f"{name}: the load client used {item.client_busy:.0%} of a core: it was the limit"
