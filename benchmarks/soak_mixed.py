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
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import httpx
from _report import RESULTS
from _servers import Server, mock_server
from _servers import server as serving

from cog_triton import errors

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from faults import processes
from faults.processes import Held
from stack import shared_memory

DIRECT = ("ensemble", "tensorrt_llm_bls")
"""Models of Triton's own API, which the server's metrics do not count."""
KINDS = ("predictions", "predictions, whole", "chat", "chat, whole", "completions", *DIRECT)
_WORDS = [
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
_BAD: list[dict[str, Any]] = [
    {"temperature": -1},
    {"max_tokens": 0},
    {"top_p": "all"},
    {"messages": [{"role": "nobody", "content": "Hi"}]},
    {"max_tokens": "many"},
]
_BAD_SHARE, _LEAVING_SHARE, _LONG_SHARE = 0.05, 0.25, 0.01
_LONG_WORDS = 4000
_PATIENCE_S, _SETTLE_S = 300.0, 15.0
_SAMPLE_PERIOD_S, _BURST_PERIOD_S = 10.0, 60.0
PLATEAU_MINUTES = 30
"""Shortest run whose memory is judged: in a shorter one caches still fill."""
PLATEAU, END = (1 / 3, 1 / 2), (5 / 6, 1.0)
"""Shares of a run: caches are full and malloc has its arenas by the first; later growth is a leak.
"""
TOLERANCE, TOLERANCE_MB = 0.05, 3.0


class Client:
    """Client that sends random requests one after another, and classifies how each ended."""

    def __init__(
        self, server: Server, http: httpx.AsyncClient, model: str, seed: int, max_words: int
    ) -> None:
        """`max_words` bounds prompts; one of a hundred is as long as that, up to 4000 words."""
        self._server = server
        self._http = http
        self._model = model
        self._random = random.Random(seed)
        self._long = min(max_words, _LONG_WORDS)

    async def one(self) -> tuple[str, str]:
        """Send one request; returns its kind and how it ended."""
        chance = self._random
        kind = chance.choice(KINDS)
        bad = kind not in DIRECT and chance.random() < _BAD_SHARE
        leaves = not bad and chance.random() < _LEAVING_SHARE
        url, body, headers = self._request(kind, bad, at_least=200 if leaves else 1)
        try:
            async with asyncio.timeout(chance.random() * 3 if leaves else _PATIENCE_S):
                outcome = await self._read(kind, url, body, headers)
        except TimeoutError:
            outcome = "left" if leaves else f"LOST: nothing for {_PATIENCE_S} s"
        except httpx.HTTPError as error:
            outcome = f"LOST: {error!r}"
        if bad and not outcome.startswith(("E1", "422")):
            outcome = f"LOST: bad input was answered {outcome}"
        return kind, outcome

    async def pause(self, mean_s: float) -> None:
        """Wait for an exponentially distributed time."""
        if mean_s:
            await asyncio.sleep(self._random.expovariate(1 / mean_s))

    def _request(
        self, kind: str, bad: bool, at_least: int
    ) -> tuple[str, dict[str, Any], dict[str, str]]:
        chance = self._random
        words = int(chance.expovariate(1 / 60)) + 1
        if chance.random() < _LONG_SHARE:
            words = self._long
        prompt = " ".join(chance.choices(_WORDS, k=min(words, self._long)))
        values: dict[str, Any] = {
            "max_tokens": min(int(chance.expovariate(1 / 40)) + at_least, 400),
            "temperature": chance.choice([0, 0.7, 1]),
        }
        if kind in DIRECT:
            body = {"text_input": prompt, "stream": True, **values}
            return f"{self._server.triton}/v2/models/{kind}/generate_stream", body, {}
        if at_least > 1:
            values["min_tokens"] = at_least
        elif chance.random() < 0.2:
            values["stop" if kind[0] == "c" else "stop_sequences"] = "and"
        wrong = chance.choice(_BAD) if bad else {}
        if kind.startswith("predictions"):
            headers = {} if kind.endswith("whole") else {"Accept": "text/event-stream"}
            body = {"input": {"prompt": prompt, **values, **wrong}}
            return f"{self._server.url}/predictions", body, headers
        url = f"{self._server.openai}/v1"
        body = {"model": self._model, "stream": not kind.endswith("whole"), **values}
        if kind == "completions":
            return f"{url}/completions", {**body, "prompt": prompt, **wrong}, {}
        chat = {"messages": [{"role": "user", "content": prompt}]}
        return f"{url}/chat/completions", {**body, **chat, **wrong}, {}

    async def _read(
        self, kind: str, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> str:
        """How a request ended: ``stop``, ``length``, a code, or a description."""
        async with self._http.stream("POST", url, json=body, headers=headers) as answer:
            text = "".join([chunk async for chunk in answer.aiter_text()])
        status = answer.status_code
        if kind in DIRECT and status == 200 and '"text_output"' in text and '"error"' not in text:
            return "answered"
        if error := errors.from_text(text):
            return error.code
        if status == 422:
            return "422"
        reasons = re.findall(r'"finish_reason":"(stop|length)"', text)
        complete = "data: [DONE]" in text or '"usage":{' in text or '"status":"succeeded"' in text
        if status == 200 and reasons and complete:
            return str(reasons[-1])
        return f"LOST: HTTP {status} {text[-200:]!r}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server: MB of each part without files, seconds and requests so far.

    `cpu` is the CPU seconds of all parts, `descriptors` their open files.
    """

    seconds: float
    requests: int
    cpu: float
    descriptors: int
    megabytes: dict[str, float]


def growth(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Median MB of each part on the plateau and at the end; 0 if it did not run then."""
    found: dict[str, list[float]] = {}
    for part in sorted({part for sample in samples for part in sample.megabytes}):
        found[part] = []
        for first, last in (PLATEAU, END):
            low, high = first * samples[-1].seconds, last * samples[-1].seconds
            within = [one for one in samples if low <= one.seconds <= high]
            held = [one.megabytes[part] for one in within if part in one.megabytes]
            found[part].append(statistics.median(held) if held else 0.0)
    return found


class Soak:
    """Clients on one server, and their account of how requests ended."""

    def __init__(
        self, server: Server, http: httpx.AsyncClient, options: argparse.Namespace
    ) -> None:
        self._server, self._http, self._options = server, http, options
        self._model = server.model()
        self.account: Counter[tuple[str, str]] = Counter()

    async def load(self, seed: int, seconds: float) -> None:
        """Run all clients, and a burst of requests at once now and then."""
        until = time.monotonic() + seconds
        clients, rate, size = self._options.clients, self._options.rate, self._options.burst

        def client(number: int) -> Client:
            own = seed * 1000 + number
            return Client(self._server, self._http, self._model, own, self._options.max_words)

        async def loop(number: int) -> None:
            one = client(number)
            while time.monotonic() < until:
                self.account[await one.one()] += 1
                await one.pause(clients / rate if rate else 0)

        async def bursts() -> None:
            burst = [client(clients + number) for number in range(size)]
            while burst and time.monotonic() < until:
                self.account.update(await asyncio.gather(*(one.one() for one in burst)))
                await asyncio.sleep(min(_BURST_PERIOD_S, max(0, until - time.monotonic())))

        await asyncio.gather(bursts(), *(loop(number) for number in range(clients)))

    async def sampled(self) -> list[Sample]:
        """Run the load; returns samples of memory, which a file gets as they are taken."""
        path: Path = self._options.samples
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = []
        began = time.monotonic()
        running = asyncio.create_task(self.load(self._options.seed, self._options.minutes * 60))
        with path.open("w") as file:
            while not running.done():
                await asyncio.wait({running}, timeout=_SAMPLE_PERIOD_S)
                samples.append(self._sample(time.monotonic() - began))
                print(json.dumps(asdict(samples[-1])), file=file, flush=True)
        running.result()
        return samples

    def _sample(self, seconds: float) -> Sample:
        memory = sorted(self._server.memory_bytes().items())
        return Sample(
            round(seconds, 1),
            sum(self.account.values()),
            round(sum(self._server.cpu_seconds().values()), 2),
            self.held().descriptors,
            {part: round(used / 1e6, 2) for part, used in memory},
        )

    def held(self) -> Held:
        """What the server's processes hold."""
        return processes.held(self._server.pid, len(shared_memory(self._server.pids)))

    async def metrics(self) -> dict[str, float]:
        """The server's own metrics, by name and labels."""
        text = (await self._http.get(f"{self._server.openai}/metrics")).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("cog_triton_"): float(value) for name, value in pairs}

    async def settled(self, before: Held) -> Held:
        """What the server holds once it is idle."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            now = await self.metrics()
            idle = not now["requests_running"] + now["requests_waiting"]
            if idle and not grown(before, self.held()):
                break
            await asyncio.sleep(0.3)
        return self.held()

    async def run(self) -> list[str]:
        """Run warm-up and load; returns what went wrong."""
        options = self._options
        await self.load(options.seed + 1, options.warm_up)
        self.account.clear()
        await asyncio.sleep(3)
        before, first = self.held(), await self.metrics()
        print(f"before: {before}", flush=True)
        began = time.monotonic()
        samples = await self.sampled()
        took = time.monotonic() - began
        after = await self.settled(before)
        last = await self.metrics()
        moved = {name: last[name] - first.get(name, 0) for name in last}
        outcomes = sorted({outcome for _, outcome in self.account})
        print(f"{'':20}" + "".join(f"{outcome[:12]:>13}" for outcome in outcomes))
        for kind in KINDS:
            print(f"{kind:20}" + "".join(f"{self.account[kind, one]:13}" for one in outcomes))
        print(
            f"{sum(self.account.values())} requests in {took:.0f} s;"
            f" {moved['generation_tokens_total'] / took:.1f} tokens/s;"
            f" load {os.getloadavg()[0]:.1f}"
        )
        cores = (samples[-1].cpu - samples[0].cpu) / (samples[-1].seconds - samples[0].seconds or 1)
        print(f"after:  {after}; {cores:.2f} cores")
        found = wrong(self.account, moved)
        if grown(before, after):
            found.append(f"it holds more: {after}; before: {before}")
        for part, (plateau, end) in growth(samples).items():
            print(f"{part:24}{samples[0].megabytes.get(part, 0):8.1f}{plateau:8.1f}{end:8.1f} MB")
            leaks = plateau and end > plateau * (1 + TOLERANCE) + TOLERANCE_MB
            if leaks and options.minutes >= PLATEAU_MINUTES:
                found.append(f"memory of {part}: {end:.1f} MB, {plateau:.1f} on the plateau")
        return found


def grown(before: Held, after: Held) -> bool:
    """Whether a server holds more than before."""
    return any(astuple(after.beyond(before, Held(0, 0, 0, 0))))


def wrong(account: Counter[tuple[str, str]], moved: dict[str, float]) -> list[str]:
    """Faults of a run: lost requests, and counts that differ."""
    found = [f"{kind}: {outcome}" for kind, outcome in account if outcome.startswith("LOST")]
    server, clients = Counter[str](), Counter[str]()
    for name, value in moved.items():
        match = re.match(r'(?:requests|errors)_total\{.*(?:outcome|code)="(\w+)"\}', name)
        if match:
            server[match[1]] += int(value)
    for (kind, outcome), count in account.items():
        clients[outcome] += count if kind not in DIRECT else 0
    total = clients.total()
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
    return found


async def soak(server: Server, options: argparse.Namespace) -> list[str]:
    """Run the soak on a server; returns what went wrong."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=_PATIENCE_S, trust_env=False) as http:
        return await Soak(server, http, options).run()


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
