"""Load soak: mixed requests on every API, with every request accounted for, and memory sampled.

    .venv/bin/python benchmarks/soak_mixed.py [engine.tar] --minutes 10
    .venv/bin/python benchmarks/soak_mixed.py --minutes 60 --rate 12 --burst 48 --samples FILE

Each client sends one request after the other: prompts and outputs of random lengths, streamed
and whole, through /predictions, /v1/chat/completions, /v1/completions and Triton's own API. A
quarter leave in the middle, and 5 of a hundred are bad input; of Triton's none are. It fails when
a request ends in neither text nor a code, when the server's own counts differ from the clients',
when processes, ports or descriptors grow, or memory does once the run's first third is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import _memory_samples
import httpx
from _mixed_requests import DIRECT, KINDS, PATIENCE_S, Client
from _report import RESULTS
from _servers import Counts, Server, mock_server
from _servers import server as serving

SETTLE_S = 15.0
SAMPLE_PERIOD_S, BURST_PERIOD_S = 10.0, 60.0
PLATEAU_MINUTES = 30
"""Shortest run whose memory is judged: in a shorter one caches still fill."""


async def metrics(server: Server, http: httpx.AsyncClient) -> dict[str, float]:
    """The server's own metrics, by name and labels."""
    text = (await http.get(f"{server.openai}/metrics")).text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("cog_triton_"): float(value) for name, value in pairs}


class Load:
    """Clients on one server, and their account of how requests ended."""

    def __init__(
        self, server: Server, http: httpx.AsyncClient, model: str, options: argparse.Namespace
    ) -> None:
        self._options = options
        self._client = lambda seed: Client(server, http, model, seed, options.max_words)
        self.account: Counter[tuple[str, str]] = Counter()

    async def run(self, seed: int, seconds: float) -> None:
        """Run all clients, and a burst of requests at once now and then."""
        until = time.monotonic() + seconds
        clients = self._options.clients
        pause_s = clients / self._options.rate if self._options.rate else 0

        async def loop(number: int) -> None:
            client = self._client(seed * 1000 + number)
            while time.monotonic() < until:
                self.account[await client.one()] += 1
                await client.pause(pause_s)

        async def bursts() -> None:
            burst = [self._client(seed * 1000 + clients + n) for n in range(self._options.burst)]
            while burst and time.monotonic() < until:
                self.account.update(await asyncio.gather(*(client.one() for client in burst)))
                await asyncio.sleep(min(BURST_PERIOD_S, max(0, until - time.monotonic())))

        await asyncio.gather(bursts(), *(loop(number) for number in range(clients)))


async def sampled(
    server: Server, load: Load, seed: int, seconds: float, path: Path
) -> list[_memory_samples.Sample]:
    """Run the load; returns samples of memory, which are appended to `path` as they are taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    samples: list[_memory_samples.Sample] = []
    began = time.monotonic()
    running = asyncio.create_task(load.run(seed, seconds))
    done = False
    while not done:
        done = bool((await asyncio.wait({running}, timeout=SAMPLE_PERIOD_S))[0])
        elapsed, requests = time.monotonic() - began, sum(load.account.values())
        descriptors = server.holds().descriptors
        samples.append(_memory_samples.take(server.pid, elapsed, requests, descriptors))
        _memory_samples.append(path, samples[-1])
    running.result()
    return samples


async def settled(server: Server, http: httpx.AsyncClient, before: Counts) -> Counts:
    """Resources that the server holds once it is idle."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        now = await metrics(server, http)
        counts = server.holds()
        if not now["requests_running"] + now["requests_waiting"] and counts.within(before):
            break
        await asyncio.sleep(0.3)
    return server.holds()


def told(account: Counter[tuple[str, str]]) -> None:
    """Print the account as a table."""
    outcomes = sorted({outcome for _, outcome in account})
    print(f"{'':20}" + "".join(f"{outcome[:12]:>13}" for outcome in outcomes))
    for kind in KINDS:
        print(f"{kind:20}" + "".join(f"{account[kind, outcome]:13}" for outcome in outcomes))


async def soak(server: Server, options: argparse.Namespace) -> list[str]:
    """Run warm-up and load; returns what went wrong."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S, trust_env=False) as http:
        model = (await http.get(f"{server.openai}/v1/models")).json()["data"][0]["id"]
        await Load(server, http, model, options).run(options.seed + 1, options.warm_up)
        idle = server.holds()
        await asyncio.sleep(3)
        before, first = server.holds(), await metrics(server, http)
        print(f"before: {before} (was {idle.descriptors} descriptors)", flush=True)
        began = time.monotonic()
        load = Load(server, http, model, options)
        samples = await sampled(server, load, options.seed, options.minutes * 60, options.samples)
        took = time.monotonic() - began
        after = await settled(server, http, before)
        last = await metrics(server, http)
    account = load.account
    told(account)
    moved = {name: last[name] - first.get(name, 0) for name in last}
    sums = Counter[str]()
    for (_, outcome), count in account.items():
        sums["LOST" if outcome.startswith("LOST") else outcome] += count
    print(
        f"{sum(sums.values())} requests in {took:.0f} s: {json.dumps(dict(sorted(sums.items())))};"
        f" {moved['generation_tokens_total'] / took:.1f} tokens/s; load {os.getloadavg()[0]:.1f}"
    )
    cores = (samples[-1].cpu - samples[0].cpu) / (samples[-1].seconds - samples[0].seconds or 1)
    print(f"after:  {after}; {cores:.2f} cores")
    for part, (plateau, end) in _memory_samples.growth(samples).items():
        print(f"{part:24}{samples[0].megabytes.get(part, 0):8.1f}{plateau:8.1f}{end:8.1f} MB")
    found = wrong(account, moved, (before, after))
    if options.minutes >= PLATEAU_MINUTES:
        found += _memory_samples.leaks(samples)
    return found


def wrong(
    account: Counter[tuple[str, str]],
    moved: dict[str, float],
    counts: tuple[Counts, Counts],
) -> list[str]:
    """Faults of a run: lost requests, counts that differ, resources that grew."""
    found = [f"{kind}: {outcome}" for kind, outcome in account if outcome.startswith("LOST")]
    account = Counter({key: count for key, count in account.items() if key[0] not in DIRECT})
    total = sum(account.values())
    server: Counter[str] = Counter()
    for name, value in moved.items():
        match = re.match(r'(?:requests|errors)_total\{.*(?:outcome|code)="(\w+)"\}', name)
        if match:
            server[match[1]] += int(value)
    clients: Counter[str] = Counter()
    for (_, outcome), count in account.items():
        clients[outcome] += count
    codes = sorted(name for name in {*server, *clients} if re.fullmatch(r"E\d{4}", name))
    print(f"server counted: {json.dumps(dict(sorted(server.items())))}")
    for name in codes:
        if clients[name] != server[name]:
            found.append(f"{name}: clients saw {clients[name]}, the server counted {server[name]}")
    # A client that leaves may do so just as its answer ends, which the server then calls an end.
    whole = server["stop"] + server["length"]
    late = whole - clients["stop"] - clients["length"]
    if not 0 <= late <= clients["left"] or late + server["cancelled"] > clients["left"]:
        found.append(
            f"clients saw {clients['stop'] + clients['length']} ends and left"
            f" {clients['left']} times; the server counted {whole} ends and"
            f" {server['cancelled']} cancelled"
        )
    never = clients["left"] - late - server["cancelled"]
    known = whole + server["cancelled"] + sum(server[name] for name in codes) + clients["422"]
    print(
        f"accounted for: {known + never} of {total}"
        f" ({late} left as they ended, {never} before they were generated)"
    )
    if known + never != total:
        found.append(f"{total - known - never} requests are not accounted for")
    if not counts[1].within(counts[0]):
        found.append(f"it holds more: {counts[1]}; before: {counts[0]}")
    return found


def main() -> int:
    """Run the soak; returns 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", nargs="?", help="engine.tar or directory; the mock if left out")
    parser.add_argument("--minutes", type=float, default=10, help="of load; 10")
    parser.add_argument("--clients", type=int, default=12, help="at once; 12")
    parser.add_argument("--warm-up", type=float, default=45, help="seconds before it counts; 45")
    parser.add_argument("--seed", type=int, default=1, help="of the random requests; 1")
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0, flat out")
    parser.add_argument("--burst", type=int, default=0, help="requests at once each minute; 0")
    parser.add_argument("--max-words", type=int, default=4000, help="of the longest prompts; 4000")
    parser.add_argument(
        "--samples",
        type=Path,
        default=RESULTS / "soak_mixed.jsonl",
        help="memory each 10 s, as JSON lines; .work/bench/soak_mixed.jsonl",
    )
    options = parser.parse_args()
    with serving(options.engine) if options.engine else mock_server(tps=100) as server:
        found = asyncio.run(soak(server, options))
    print("\n".join(["WRONG:", *found]) if found else "nothing was wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
