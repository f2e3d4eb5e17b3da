"""Load soak: mixed requests on both APIs for minutes, with every request accounted for.

    .venv/bin/python benchmarks/soak_mixed.py engine.tar --minutes 10

Each client sends one request after the other: prompts and outputs of random lengths, streamed
and whole, through /predictions, /v1/chat/completions and /v1/completions. More than 20 of a
hundred leave in the middle, and 5 are bad input. It fails when a request ends in neither text
nor a code, when the server's own counts differ from the clients', or when processes, ports,
descriptors or memory grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from served import Counts, Server, read

from cog_triton import errors

ENGINE = "engine_process"
WORDS = [
    "the",
    "sky",
    "is",
    "blue",
    "and",
    "rivers",
    "run",
    "to",
    "seas",
    "while",
    "people",
    "talk",
]
PYTHONS = {
    "reaper": "reaper",
    "cog_triton.door": "door",
    "template_child": "chat templates",
    "coglet.http_server": "cog",
    "coglet": "predictor",
    ENGINE: ENGINE,
    "cog_triton serve": "cog-triton serve",
}
KINDS = ("predictions", "predictions, whole", "chat", "chat, whole", "completions")
BAD: list[dict[str, Any]] = [
    {"temperature": -1},
    {"max_tokens": 0},
    {"top_p": "all"},
    {"messages": [{"role": "nobody", "content": "Hi"}]},
    {"seed": -5},
]
PATIENCE_S = 300
SETTLE_S = 15.0


class Client:
    """Client that sends random requests one after another, and classifies how each ended."""

    def __init__(self, server: Server, http: httpx.AsyncClient, model: str, seed: int) -> None:
        self._server = server
        self._http = http
        self._model = model
        self._random = random.Random(seed)

    async def one(self) -> tuple[str, str]:
        """Send one request; returns its kind and how it ended."""
        chance = self._random
        kind = chance.choice(KINDS)
        bad = chance.random() < 0.05
        leaves = not bad and chance.random() < 0.25
        url, body, headers = self._request(kind, bad, at_least=200 if leaves else 1)
        try:
            sending = self._send(url, body, headers, leaves)
            outcome = await asyncio.wait_for(sending, PATIENCE_S)
        except asyncio.TimeoutError:
            outcome = f"LOST: nothing for {PATIENCE_S} s"
        except httpx.HTTPError as error:
            outcome = f"LOST: {error!r}"
        if bad and not outcome.startswith(("E1", "422")):
            outcome = f"LOST: bad input was answered {outcome}"
        return kind, outcome

    def _request(
        self, kind: str, bad: bool, at_least: int
    ) -> tuple[str, dict[str, Any], dict[str, str]]:
        chance = self._random
        prompt = " ".join(chance.choices(WORDS, k=int(chance.expovariate(1 / 60)) + 1))
        values: dict[str, Any] = {
            "max_tokens": min(int(chance.expovariate(1 / 40)) + at_least, 400),
            "temperature": chance.choice([0, 0.7, 1]),
        }
        if at_least > 1:
            values["min_tokens"] = at_least
        elif chance.random() < 0.2:
            values["stop" if kind[0] == "c" else "stop_sequences"] = "and"
        wrong = chance.choice(BAD) if bad else {}
        if kind.startswith("predictions"):
            headers = {} if kind.endswith("whole") else {"Accept": "text/event-stream"}
            body = {"input": {"prompt": prompt, **values, **wrong}}
            return f"http://127.0.0.1:{self._server.port}/predictions", body, headers
        url = f"http://127.0.0.1:{self._server.openai_port}/v1"
        body = {"model": self._model, "stream": not kind.endswith("whole"), **values}
        if kind == "completions":
            return f"{url}/completions", {**body, "prompt": prompt, **wrong}, {}
        chat = {"messages": [{"role": "user", "content": prompt}]}
        return f"{url}/chat/completions", {**body, **chat, **wrong}, {}

    async def _send(
        self, url: str, body: dict[str, Any], headers: dict[str, str], leaves: bool
    ) -> str:
        reading = self._read(url, body, headers)
        if not leaves:
            return await reading
        try:
            return await asyncio.wait_for(reading, self._random.random() * 3)
        except asyncio.TimeoutError:
            return "left"

    async def _read(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> str:
        async with self._http.stream("POST", url, json=body, headers=headers) as answer:
            text = "".join([chunk async for chunk in answer.aiter_text()])
        return _ended(answer.status_code, text)


def _ended(status: int, text: str) -> str:
    """How a request ended: ``stop``, ``length``, a code, or a description."""
    error = errors.from_text(text)
    if error is not None:
        return error.code
    if status == 422:
        return "422"
    reasons = re.findall(r'"finish_reason":"(stop|length)"', text)
    complete = "data: [DONE]" in text or '"usage":{' in text or '"status":"succeeded"' in text
    if status == 200 and reasons and complete:
        return str(reasons[-1])
    return f"LOST: HTTP {status} {text[-200:]!r}"


async def metrics(server: Server, http: httpx.AsyncClient) -> dict[str, float]:
    """The server's own metrics, by name and labels."""
    text = (await http.get(f"http://127.0.0.1:{server.openai_port}/metrics")).text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("cog_triton_"): float(value) for name, value in pairs}


def memory(server: Server) -> dict[str, int]:
    """Resident megabytes, by program."""
    found: Counter[str] = Counter()
    for pid in server.pids:
        words = read(pid, "cmdline").decode().split("\0")
        name = Path(words[0]).name
        if name.endswith("_stub") and len(words) > 1:
            name = f"stub of {Path(words[1]).parent.parent.name}"
        elif name.startswith("python"):
            name = next((n for mark, n in PYTHONS.items() if mark in " ".join(words)), "python")
        rss = re.search(rb"VmRSS:\s+(\d+)", read(pid, "status"))
        found[name] += int(rss[1]) // 1024 if rss else 0
    return dict(found)


async def load(
    server: Server, http: httpx.AsyncClient, model: str, clients: int, seed: int, seconds: float
) -> Counter[tuple[str, str]]:
    """Run `clients` clients for `seconds`; returns how their requests ended."""
    account: Counter[tuple[str, str]] = Counter()
    until = time.monotonic() + seconds

    async def loop(number: int) -> None:
        client = Client(server, http, model, seed * 1000 + number)
        while time.monotonic() < until:
            account[await client.one()] += 1

    await asyncio.gather(*(loop(number) for number in range(clients)))
    return account


async def settled(server: Server, http: httpx.AsyncClient, before: Counts) -> Counts:
    """Resources that the server holds once it is idle."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        now = await metrics(server, http)
        counts = server.counts()
        if not now["requests_running"] + now["requests_waiting"] and counts.within(before):
            break
        await asyncio.sleep(0.3)
    return server.counts()


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
        for _ in range(600):
            if server.process.poll() is not None:
                raise SystemExit(f"the server ended:\n{server.log.read_text()}")
            if await server.ready(http):
                break
            await asyncio.sleep(0.2)
        listed = await http.get(f"http://127.0.0.1:{server.openai_port}/v1/models")
        model = listed.json()["data"][0]["id"]
        await load(server, http, model, options.clients, options.seed + 1, options.warm_up)
        idle = server.counts()
        await asyncio.sleep(3)
        before, held, first = server.counts(), memory(server), await metrics(server, http)
        print(f"before: {before}, MB {held} (was {idle.descriptors} descriptors)", flush=True)
        began = time.monotonic()
        seconds = options.minutes * 60
        account = await load(server, http, model, options.clients, options.seed, seconds)
        took = time.monotonic() - began
        after = await settled(server, http, before)
        last, holds = await metrics(server, http), memory(server)
    told(account)
    moved = {name: last[name] - first.get(name, 0) for name in last}
    sums = Counter[str]()
    for (_, outcome), count in account.items():
        sums["LOST" if outcome.startswith("LOST") else outcome] += count
    print(
        f"{sum(sums.values())} requests in {took:.0f} s: {json.dumps(dict(sorted(sums.items())))};"
        f" {moved['generation_tokens_total'] / took:.1f} tokens/s; load {os.getloadavg()[0]:.1f}"
    )
    print(f"after:  {after}, MB {holds}")
    return wrong(account, moved, (before, after), (held, holds))


def wrong(
    account: Counter[tuple[str, str]],
    moved: dict[str, float],
    counts: tuple[Counts, Counts],
    held: tuple[dict[str, int], dict[str, int]],
) -> list[str]:
    """Faults of a run: lost requests, counts that differ, resources that grew."""
    found = [f"{kind}: {outcome}" for kind, outcome in account if outcome.startswith("LOST")]
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
    for name, megabytes in held[1].items():
        # The engine's KV cache grows up to its limit, and the prefixes that it keeps fill it.
        if name != ENGINE and megabytes > held[0].get(name, 0) * 1.2 + 50:
            found.append(f"memory of {name}: {megabytes} MB; before: {held[0].get(name, 0)}")
    return found


def main() -> int:
    """Run the soak; returns 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", help="engine.tar or engine directory")
    parser.add_argument("--minutes", type=float, default=10, help="of load; 10")
    parser.add_argument("--clients", type=int, default=12, help="at once; 12")
    parser.add_argument("--warm-up", type=float, default=45, help="seconds before it counts; 45")
    parser.add_argument("--seed", type=int, default=1, help="of the random requests; 1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work_dir:
        server = Server(options.engine, work_dir)
        try:
            found = asyncio.run(soak(server, options))
        finally:
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
    if code:
        found.append(f"the server ended with {code}")
    print("\n".join(["WRONG:", *found]) if found else "nothing was wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
