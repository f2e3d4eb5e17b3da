"""Tenants on one engine: what a flood of one adds to another's TTFT, and shares by weight.

The mock engine has 64 streams, steps of 20 ms, and 0.05 ms a prompt token, so that a prompt of 4000
takes 200 ms. One tenant floods with 200 prompts of 4000 tokens, again and again, while another asks
each 200 ms: alone, beside the flood by a key of its own, and with one key for both. Then three
tenants of weights 1, 2 and 4 ask for more than there is. CPU a token is that with three tenants by
that with one key, in pairs, with the interval of their median.

    .venv/bin/python benchmarks/tenants.py --cost-only --pairs 60 --against COMMIT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import _resource_usage
import _servers
import against_commit
from _report import Figure, Grid, Report, Target, main, say
from prometheus_client import CollectorRegistry

from cog_triton.engines.request import EngineRequest
from cog_triton.front.access import Access
from cog_triton.front.keyring import Keyring, sha256_of
from cog_triton.front.message import Request
from cog_triton.serving.admission import Admission, Ticket
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry.tenant_metrics import TenantMetrics
from cog_triton.serving.tenant_limits import TenantLimits
from cog_triton.serving.tenants import Tenant
from cog_triton.text.sampling import SamplingParams

STREAMS, STEP_MS, PREFILL_MS = 64, 20.0, 0.05
FLOOD, LONG, PERIOD_S = 200, 4000, 0.2
WEIGHTS = {"one": 1, "two": 2, "four": 4}
MOST_ADDED_MS = STEP_MS + LONG * PREFILL_MS
MOST_COST, RESAMPLES, TOTAL = 1.03, 4000, "all"
RUNS, EACH = 100, 200
OWN, SAME = "a key of its own", "one key for both"
ONE_KEY = {"COG_TRITON_API_KEY": "a", "LOG_REQUESTS": "0", "MAX_QUEUE": "1000"}
_MODEL = "mock"
_TOKENS = re.compile(
    r'^cog_triton_tenant_(?:prompt|generation)_tokens_total\{tenant="(\w+)"\} (\S+)$', re.MULTILINE
)


def percentile(values: list[float], of_100: int) -> float:
    """The smallest value that so many of a hundred do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-len(ordered) * of_100 // 100) - 1)]


def jain(values: list[float]) -> float:
    """Jain's index: 1 where all are alike, 1/n where one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@contextmanager
def tenants(names: dict[str, float]) -> Iterator[dict[str, str]]:
    """Environment of a server with a key for each name, which is the key; and ``root``."""
    with tempfile.TemporaryDirectory(prefix="cog-triton-bench-") as scratch:
        lines = [
            {"name": name, "sha256": sha256_of(name.encode()), "weight": weight}
            for name, weight in names.items()
        ]
        lines.append({"name": "root", "sha256": sha256_of(b"root"), "apis": ["metrics"]})
        file = Path(scratch) / "keys"
        file.write_text("\n".join(map(json.dumps, lines)))
        yield {"COG_TRITON_KEYS": str(file), "LOG_REQUESTS": "0", "MAX_QUEUE": "1000"}


class Client:
    """Requests to the OpenAI API of a server, with keys; a connection each."""

    def __init__(self, base: str) -> None:
        self._port = int(base.rpartition(":")[2])

    async def _lines(self, key: str, head: str, body: bytes = b"") -> AsyncIterator[bytes]:
        """Lines of the answer, after those of its head; raises AssertionError unless it is 200."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head += f" HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
            head += "content-type: application/json\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            assert b" 200 " in status, status + await reader.read()
            while (await reader.readline()).strip():
                pass
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    def _completion(
        self, key: str, prompt: int, output: int, *, stream: bool
    ) -> AsyncIterator[bytes]:
        body = {"model": _MODEL, "prompt": [5] * prompt, "max_tokens": output, "stream": stream}
        return self._lines(key, "POST /v1/completions", json.dumps(body).encode())

    async def ask(self, key: str, prompt: int, output: int) -> int:
        """Tokens of a whole answer."""
        lines = [line async for line in self._completion(key, prompt, output, stream=False)]
        return int(json.loads(b"".join(lines))["usage"]["completion_tokens"])

    async def first_token_s(self, key: str, prompt: int, output: int) -> float:
        """Seconds to the first token of a stream, which is read to its end."""
        began, first = time.perf_counter(), 0.0
        async for line in self._completion(key, prompt, output, stream=True):
            if not first and line.startswith(b"data:"):
                first = time.perf_counter() - began
        return first

    async def repeat(self, key: str, prompt: int, output: int) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.ask(key, prompt, output)

    async def served(self) -> dict[str, float]:
        """Tokens of each tenant so far."""
        text = b"".join([line async for line in self._lines("root", "GET /metrics")]).decode()
        found: dict[str, float] = {}
        for name, count in _TOKENS.findall(text):
            found[name] = found.get(name, 0.0) + float(count)
        return found


async def seldom(client: Client, key: str, count: int) -> list[float]:
    """TTFT of `count` requests, one each `PERIOD_S`."""
    began, tasks = time.perf_counter(), []
    for place in range(count):
        await asyncio.sleep(began + place * PERIOD_S - time.perf_counter())
        tasks.append(asyncio.ensure_future(client.first_token_s(key, 20, 16)))
    return await asyncio.gather(*tasks)


@contextmanager
def flooding(client: Client, loads: dict[str, tuple[int, int, int]]) -> Iterator[None]:
    """Clients by key: how many, their prompts and outputs; each asks again when it is answered."""
    tasks = [
        asyncio.ensure_future(client.repeat(key, prompt, output))
        for key, (count, prompt, output) in loads.items()
        for _ in range(count)
    ]
    try:
        yield
        assert not any(task.done() for task in tasks), "a request of the flood failed"
    finally:
        for task in tasks:
            task.cancel()


async def measure_flood(base: str, key: str, count: int, flood: int) -> list[float]:
    """TTFT of who asks seldom, by this key, beside a flood of tenant a."""
    client = Client(base)
    await seldom(client, key, 5)
    with flooding(client, {"a": (flood, LONG, 64)} if flood else {}):
        await asyncio.sleep(2)
        return await seldom(client, key, count)


async def measure_shares(base: str, seconds: float, each: int) -> dict[str, float]:
    """Tokens of each tenant in overload."""
    client = Client(base)
    with flooding(client, dict.fromkeys(WEIGHTS, (each, 200, 50))):
        await asyncio.sleep(seconds / 4)
        before = await client.served()
        await asyncio.sleep(seconds)
        after = await client.served()
    return {name: after[name] - before.get(name, 0.0) for name in WEIGHTS}


async def cpu_us(server: _servers.Server, keys: Sequence[str], output: int) -> Mapping[str, float]:
    """CPU microseconds a token of each part of a server, whose streams are of these keys in turns.

    `TOTAL` is that of all processes.
    """
    client = Client(server.openai)
    before = server.cpu_seconds()
    asked = (client.ask(keys[place % len(keys)], 20, output) for place in range(STREAMS))
    made = sum(await asyncio.gather(*asked))
    used = _resource_usage.spent(before, server.cpu_seconds())
    return {
        part: seconds * 1e6 / made for part, seconds in {**used, TOTAL: sum(used.values())}.items()
    }


def interval(values: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """Bootstrap interval of 95 % of the median."""
    some = random.Random(seed)
    medians = sorted(
        statistics.median(some.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def request_us(keys: Path | None, tenants: Sequence[Tenant | None], running: int = 16) -> float:
    """CPU microseconds of what is done for a request's key, its place in the queue and its bill.

    It is the least of many runs in this process, which no other one disturbs; so it tells apart
    what is lost in the noise of whole servers.
    """
    access = Access("one", True, Keyring(keys) if keys else None)
    headers = [(b"authorization", b"Bearer one"), (b"content-type", b"application/json")]
    request = Request("POST", b"/v1/completions", headers, b"{}", peer="127.0.0.1")
    admission, limits = Admission(4 * running), TenantLimits()
    metrics = TenantMetrics(CollectorRegistry())
    result = GenerationResult(queue_time=0.0)
    engine = EngineRequest(input_ids=[5] * 20, sampling=SamplingParams(max_tokens=1))
    planned = [GenerationRequest(engine=engine, tenant=tenant) for tenant in tenants]

    def entered(place: int) -> Ticket:
        ticket = Ticket()
        ticket.tenant, ticket.prompt_tokens = tenants[place % len(tenants)], 20
        admission.enter(ticket, lambda: None)
        admission.proven(ticket)
        return ticket

    held = [entered(place) for place in range(running)]
    best = float("inf")
    for _ in range(RUNS):
        began = time.thread_time()
        for place in range(EACH):
            tenant = tenants[place % len(tenants)]
            access.check(request, "openai")
            limits.begin(tenant)
            ticket = entered(place)
            limits.used(tenant, 20)
            admission.leave(ticket)
            metrics.ended(planned[place % len(tenants)], result, "length")
        best = min(best, time.thread_time() - began)
    for ticket in held:
        admission.leave(ticket)
    return best * 1e6 / EACH


def added_us() -> float:
    """CPU microseconds that a request of one of three tenants takes more than one without."""
    with tenants(WEIGHTS) as keys:
        every = [Tenant(name=name, weight=weight) for name, weight in WEIGHTS.items()]
        return request_us(Path(keys["COG_TRITON_KEYS"]), every) - request_us(None, [None])


def measure_cost(pairs: int, output: int, against: str) -> Iterator[Figure | Grid]:
    """CPU a token with keys of three tenants over that with one key, and over another commit's.

    All servers run at once and are asked in turns, each pair in the opposite order of the one
    before (ABBA), so that what the machine does meanwhile is in both.
    """
    with ExitStack() as stack:

        def served(environment: dict[str, str], checkout: Path | None = None) -> _servers.Server:
            started = _servers.mock_server(
                tps=100, clock=_servers.STEP_CLOCK, environment=environment, checkout=checkout
            )
            return stack.enter_context(started)

        sides = {"three tenants": (served(stack.enter_context(tenants(WEIGHTS))), [*WEIGHTS])}
        sides["one key"] = served(ONE_KEY), ["a"]
        if against:
            sides[against] = served(ONE_KEY, against_commit.checkout(against)), ["a"]
        cost: dict[str, list[Mapping[str, float]]] = {name: [] for name in sides}
        for place in range(-1, pairs):  # the first one warms up
            for name in [*sides][:: -1 if place % 2 else 1]:
                found = asyncio.run(cpu_us(*sides[name], output))
                if place >= 0:
                    cost[name].append(found)
    parts = sorted({part for found in cost.values() for part in found[0]} - {TOTAL})
    grid = Grid(f"CPU us a token, means of {pairs}", ("", "all", *parts))
    for name, found in cost.items():
        means = (statistics.mean(one.get(part, 0) for one in found) for part in (TOTAL, *parts))
        grid.add(name, *(f"{mean:.1f}" for mean in means))
    yield grid
    own, *others = cost
    for other in others:
        ratios = [a[TOTAL] / b[TOTAL] for a, b in zip(cost[own], cost[other], strict=True)]
        low, high = interval(ratios)
        told = f"CPU a token over that of {other} ({low:.3f} to {high:.3f} in 95 %)"
        target = Target(MOST_COST) if other == "one key" else None
        say(f"{told}: {statistics.median(ratios):.3f} in {pairs} pairs")
        yield Figure(told, statistics.median(ratios), "x", target)
        if other == "one key":
            added, base = added_us(), statistics.median(one[TOTAL] for one in cost[other])
            told = f"the same by what {added:.0f} us a request add, {output} tokens each"
            yield Figure(told, 1 + added / output / base, "x", target)


def run(args: argparse.Namespace) -> Report:
    """Measure the flood, the shares and the cost."""
    count, flood, seconds, pairs, output = args.requests, FLOOD, args.seconds, args.pairs, 100
    if args.quick:
        count, flood, seconds, pairs, output = 5, 70, 2.0, 2, 50
    report = Report("tenants", "several tenants on one engine")
    if not args.cost_only:
        measure_sharing(report, count, flood, seconds)
    for found in measure_cost(pairs, output, args.against):
        if isinstance(found, Grid):
            report.grids.append(found)
        else:
            report.figures.append(found)
    return report


def measure_sharing(report: Report, count: int, flood: int, seconds: float) -> None:
    """Put into the report what a flood adds to another's TTFT, and shares in overload."""
    mock = ("--engine", "mock")
    pace = {"MOCK_STEP_MS": f"{STEP_MS:g}", "MOCK_PREFILL_MS": f"{PREFILL_MS:g}"}
    pace["MOCK_MAX_BATCH_SIZE"] = "64"
    times = {}
    with (
        tenants({"a": 1, "b": 1}) as keys,
        _servers.server(*mock, environment={**keys, **pace}) as server,
    ):
        for name, size in (("alone", 0), (OWN, flood)):
            times[name] = asyncio.run(measure_flood(server.openai, "b", count, size))
    with _servers.server(*mock, environment={**ONE_KEY, **pace}) as server:
        times[SAME] = asyncio.run(measure_flood(server.openai, "a", count // 5, flood))
    grid = Grid("TTFT of who asks seldom", ("beside a flood", "requests", "p50 ms", "p99 ms"))
    p99 = {name: percentile(values, 99) * 1000 for name, values in times.items()}
    for name, values in times.items():
        grid.add(name, len(values), statistics.median(values) * 1000, p99[name])
        say(f"{name}: p50 {statistics.median(values) * 1000:.0f} ms, p99 {p99[name]:.0f} ms")
    added = p99[OWN] - p99["alone"]
    report.figures.append(
        Figure("p99 TTFT that a flood adds, own key", added, "ms", Target(MOST_ADDED_MS))
    )
    report.figures.append(Figure(f"the same, {SAME}", p99[SAME] - p99["alone"], "ms", None))
    report.grids.append(grid)
    with tenants(WEIGHTS) as keys, _servers.server(*mock, environment={**keys, **pace}) as server:
        had = asyncio.run(measure_shares(server.openai, seconds, flood // 2))
    total, weights = sum(had.values()), sum(WEIGHTS.values())
    grid = Grid("shares in overload", ("weight", "tokens", "share", "of its due"))
    for name, weight in WEIGHTS.items():
        due = had[name] / total / (weight / weights)
        grid.add(weight, had[name], f"{had[name] / total:.3f}", f"{due:.3f}")
        say(f"weight {weight}: {had[name] / total:.3f}, {due:.3f} of its due")
    worst = max(abs(had[n] / total / (w / weights) - 1) for n, w in WEIGHTS.items())
    report.grids.append(grid)
    report.figures.append(Figure("farthest share from its due", worst * 100, "%", Target(5)))
    index = jain([had[name] / weight for name, weight in WEIGHTS.items()])
    report.figures.append(
        Figure("Jain's index of weighted shares", index, "", Target(0.98, least=True))
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=500, help="of who asks seldom")
    parser.add_argument("--seconds", type=float, default=40, help="of overload")
    parser.add_argument("--pairs", type=int, default=100, help="of CPU a token")
    parser.add_argument("--cost-only", action="store_true", help="CPU a token alone")
    parser.add_argument("--against", default="", help="another commit, whose CPU a token is told")


if __name__ == "__main__":
    main("tenants", __doc__, run, arguments)
