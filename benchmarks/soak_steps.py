"""Step soak: every token of the mock is compared with what it says, while processes are killed.

    .venv/bin/python benchmarks/soak_steps.py --tokens 1e7

Streams of both APIs run on the step clock. By turns the engine's process, stubs, tritonserver and
Cog's worker are killed or stopped for a moment; clients leave at random. Each stream has to end in
its complete text or in an error with a code of --codes. A killed worker ends the server: streams
that were cut off then are counted apart, and the server is started again. Exits with 1 if anything
was lost, doubled, out of order or ended otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import _resource_usage
import _servers
from _known_text import (
    COMPLETE,
    WRONG,
    KnownCompletion,
    KnownPrediction,
    KnownStream,
    KnownText,
)
from _load import QuickAckClient
from _report import Figure, Grid, Report, Target, main, say
from _servers import Server

from cog_triton.bench.http_client import BufferedResponse, TransportError, encode_request

LEFT, CUT, HUNG, UNEXPECTED = "left", "cut off", "hung", "cut off by no kill"
CALM = "nothing"
_ANSWER_S = 120.0
_READY_S = 120.0
_AGAIN_S = 0.2
_LEAVES = 0.05
_SPAN = (20, 3000)
"""Tokens of a stream: at least, at most."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A process that is killed, or stopped for some seconds."""

    part: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"stop {self.part} {self.seconds:g} s" if self.seconds else f"kill {self.part}"


ENGINE, STEPS, TRITON, WORKER = "engine", "stub engine_steps", "tritonserver", "worker"
STRIKES = (
    *(Strike(part) for part in (ENGINE, STEPS, TRITON)),
    *(Strike(part, seconds) for part in (STEPS, TRITON) for seconds in (0.1, 0.3, 1.5)),
    *(Strike(WORKER, seconds) for seconds in (0.5, 0.9, 3)),
)
LAST = Strike(WORKER)
PATIENT = {"COG_PROBE_PERIOD": "3600", "TRITON_MAX_RESTARTS": "20", "RESUME": "0"}
"""The front door ends a server when it sees that a process of Cog was stopped."""


@dataclass(slots=True)
class Findings:
    """What has come of all streams; `ends` is outcome counts by the strike before."""

    tokens: int = 0
    strike: str = CALM
    dying: bool = False
    ends: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    struck: Counter[str] = field(default_factory=Counter)
    to_ready: dict[str, float] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def take(self, stream: KnownStream, outcome: str, said: object = "") -> None:
        """Count a stream that has ended."""
        self.tokens += stream.checked
        outcome = stream.wrong or outcome
        self.ends[self.strike][f"{stream.path} {outcome}"] += 1
        self.examples.setdefault(
            outcome,
            f"after {self.strike}: {stream.path}, {stream.checked} of {stream.tokens} tokens,"
            f" then {stream.astray!r} {stream.error!r} {said}",
        )

    def outcomes(self) -> Counter[str]:
        """Number of streams by outcome."""
        found: Counter[str] = Counter()
        for ends in self.ends.values():
            for name, count in ends.items():
                found[name.partition(" ")[2]] += count
        return found


class Life:
    """One server, from its start until its worker is killed or the soak ends."""

    def __init__(
        self, server: Server, known: KnownText, found: Findings, args: argparse.Namespace
    ) -> None:
        self.server, self.known, self.found, self.args = server, known, found, args
        self.client = QuickAckClient(_ANSWER_S)
        self.stopping = False

    @property
    def done(self) -> bool:
        return self.found.tokens >= self.args.tokens

    async def run(self) -> None:
        """Strike with every kind once, while all users ask."""
        async with self.users():
            strikes = random.sample(STRIKES, len(STRIKES))
            for strike in (*strikes, LAST):
                if self.args.only not in str(strike):
                    continue
                await self.calm(self.args.every)
                if self.done:
                    return
                await self.strike(strike)

    @asynccontextmanager
    async def users(self) -> AsyncIterator[None]:
        kinds = (KnownCompletion, KnownPrediction)
        tasks = [asyncio.create_task(self.user(kinds[n % 2])) for n in range(self.args.streams)]
        try:
            yield
        finally:
            self.stopping = True
            await asyncio.gather(*tasks)

    async def user(self, kind: type[KnownStream]) -> None:
        """Ask again and again; some leave before the end."""
        url = self.server.url if kind is KnownPrediction else self.server.openai
        while not self.stopping:
            stream = kind(self.known, random.randint(*_SPAN))
            extra = {"logprobs": 0} if kind is KnownCompletion and random.random() < 0.1 else {}
            body = json.dumps(stream.request(prompt="Tell me about the sea.", **extra)).encode()
            headers = {"Accept": "text/event-stream"}
            request = encode_request("POST", f"{url}{kind.path}", headers, body)
            stays = random.random() >= _LEAVES
            patience = _ANSWER_S * 2 if stays else random.uniform(0, 3)
            said: object = ""
            try:
                await asyncio.wait_for(self.client.send(*request, stream), patience)
                outcome = stream.outcome
            except asyncio.TimeoutError:
                outcome = LEFT
            except (TransportError, OSError) as error:
                said = error
                cut = CUT if self.found.dying else UNEXPECTED
                is_late = isinstance(error, TransportError) and error.kind == "timeout"
                outcome = HUNG if is_late else cut
            self.found.take(stream, outcome, said)
            if outcome not in (COMPLETE, LEFT):
                if self.found.dying:
                    return
                await asyncio.sleep(_AGAIN_S)

    async def strike(self, strike: Strike) -> None:
        """Strike, and wait until the server is READY again, or has ended."""
        pids = [pid for part, pid in _resource_usage.tree(self.server.pid) if part == strike.part]
        if not pids:
            raise RuntimeError(f"there is no {strike.part}")
        found, began = self.found, time.monotonic()
        found.strike, found.dying = str(strike), strike == LAST
        found.struck[found.strike] += 1
        self.stopping = found.dying
        os.kill(pids[0], signal.SIGSTOP if strike.seconds else signal.SIGKILL)
        if strike.seconds:
            await asyncio.sleep(strike.seconds)
            with suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGCONT)
        if not found.dying:
            await asyncio.sleep(1)
            await self.until_ready()
            took = time.monotonic() - began
            found.to_ready[found.strike] = max(took, found.to_ready.get(found.strike, 0))
        say(f"{found.tokens} tokens; {strike}: {time.monotonic() - began:.1f} s")

    async def calm(self, seconds: float) -> None:
        """Let streams run."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.done:
            await asyncio.sleep(0.1)

    async def until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            answer = BufferedResponse()
            with suppress(TransportError, OSError):
                url = f"{self.server.url}/health-check"
                await self.client.send(*encode_request("GET", url, {}), answer)
                if b'"READY"' in answer.text:
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"not READY within {_READY_S:g} s: {answer.text[:500]!r}")


def run(args: argparse.Namespace) -> Report:
    """Run servers, one after the other, until so many tokens were compared."""
    if args.quick:
        args.tokens, args.every = 20_000, 1.0
    if not any(args.only in str(strike) for strike in (*STRIKES, LAST)):
        raise SystemExit(f"--only={args.only}: known are {', '.join(map(str, (*STRIKES, LAST)))}")
    known, found = KnownText(), Findings()
    began = time.monotonic()
    arguments = (f"--tokens-per-response={args.tokens_per_step}", f"--step-ms={args.step_ms:g}")
    while found.tokens < args.tokens:
        with _servers.mock_server(*arguments, environment=PATIENT) as server:
            found.strike, found.dying = CALM, False
            asyncio.run(Life(server, known, found, args).run())
    return tell(found, args, time.monotonic() - began)


def tell(found: Findings, args: argparse.Namespace, seconds: float) -> Report:
    """Table by strike, and the counts that have to be 0."""
    report = Report("soak_steps", "every token compared while processes are killed")
    outcomes = found.outcomes()
    allowed = {COMPLETE, LEFT, CUT, *args.codes.split(",")}
    columns = ["after", "times", *sorted(allowed), "other", "READY after s, at most"]
    grid = Grid(f"{args.streams} streams: how they ended", columns)
    for strike, ends in found.ends.items():
        by_outcome: Counter[str] = Counter()
        for name, count in ends.items():
            by_outcome[name.partition(" ")[2]] += count
        others = sum(count for name, count in by_outcome.items() if name not in allowed)
        counts = [by_outcome[name] for name in sorted(allowed)]
        ready = found.to_ready.get(strike, "")
        grid.add(strike, found.struck[strike] or "", *counts, others, ready)
    report.grids.append(grid)
    report.figures.append(Figure("tokens compared", found.tokens, "tokens"))
    report.figures.append(Figure("streams", outcomes.total(), "streams"))
    others = sorted(set(outcomes) - allowed - {*WRONG, HUNG, UNEXPECTED})
    for name in (*WRONG, HUNG, UNEXPECTED, *others):
        report.figures.append(Figure(name, outcomes[name], "streams", Target(0)))
    report.notes += [
        f"{name}: {said}" for name, said in found.examples.items() if name not in (COMPLETE, LEFT)
    ]
    report.notes.append(f"{sum(found.struck.values())} strikes; {found.tokens / seconds:.0f} tok/s")
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=float, default=1e6, help="to be compared; 1e6")
    parser.add_argument("--streams", type=int, default=64, help="at once, half of each API; 64")
    parser.add_argument("--step-ms", type=float, default=4, help="of the mock; 4")
    parser.add_argument("--tokens-per-step", type=int, default=1, help="of each stream; 1")
    parser.add_argument(
        "--every",
        type=float,
        default=5.5,
        help="seconds from READY to the next strike; less than 5 is a crash loop; 5.5",
    )
    parser.add_argument("--only", default="", help="strikes whose name has this, as in the table")
    parser.add_argument("--codes", default="E2105", help="errors that streams may end with")


if __name__ == "__main__":
    made = main("soak_steps", __doc__, run, arguments)
    sys.exit(any(figure.verdict == "missed" for figure in made.figures))
