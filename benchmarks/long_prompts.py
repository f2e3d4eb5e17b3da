"""False alarms: prompts of 100,000 tokens one after another, and what the watchdogs make of them.

    .venv/bin/python benchmarks/long_prompts.py
    .venv/bin/python benchmarks/long_prompts.py mock --minutes 10

A small OpenVINO engine is made and served, which computes a whole prompt in one step (or in pieces,
--step-tokens 512). Short requests run beside. No engine may be ended or restarted meanwhile. Ends
after --minutes, and the prompt that runs then; Ctrl-C ends it at once, with the result so far.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from _long_model import POSITIONS, build
from _report import Grid, show
from _servers import Server
from _servers import server as serving

from cog_triton.bench.http_client import Client, TransportError

_PAUSE_S = 2.0
_PATIENCE_S = 3600.0
_TOKENS_TOLD = 8
_MOST_TOKENS = POSITIONS - _TOKENS_TOLD
_IDS = 2_000  # which every vocabulary has, the mock's too
_RESTARTS = re.compile(r"^cog_triton_engine_restarts_total (\S+)$", re.MULTILINE)
_ENDS = re.compile(r"engine process \d+ (?:has died|was killed|exited)")


@dataclass
class Outcome:
    """Seconds of the requests that were answered, and what went wrong."""

    began: float = field(default_factory=time.monotonic)
    long: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    restarts: int = 0
    ends: int = 0

    def table(self) -> Grid:
        """Its only row."""
        grid = Grid("", ("minutes", "long prompts", "s: median", "longest", "short requests",
                         "longest", "errors", "engines ended", "restarts"))  # fmt: skip
        grid.add(
            *((time.monotonic() - self.began) / 60, len(self.long)),
            *(statistics.median(self.long or [0.0]), max(self.long, default=0.0)),
            *(len(self.short), max(self.short, default=0.0)),
            *(len(self.errors), self.ends, self.restarts),
        )
        return grid


class Load:
    """The requests, and the counts of a server."""

    def __init__(self, server: Server, http: Client, outcome: Outcome) -> None:
        self._server = server
        self._http = http
        self._outcome = outcome
        self._number = 0

    async def run(self, tokens: int, seconds: float) -> None:
        """Long prompts one after another for so long, with short ones beside."""
        short = asyncio.ensure_future(self._short())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (took := await self._request(tokens)) is not None:
                self._outcome.long.append(took)
                print(f"prompt {len(self._outcome.long)}: {took:.1f} s", flush=True)
        short.cancel()
        await asyncio.gather(short, return_exceptions=True)

    async def _short(self) -> None:
        while True:
            if (took := await self._request(8)) is not None:
                self._outcome.short.append(took)
            await self.count()
            await asyncio.sleep(_PAUSE_S)

    async def count(self) -> None:
        """Read how often engines ended and were restarted."""
        answer = await self._http.fetch("GET", f"{self._server.openai}/metrics", {})
        if found := _RESTARTS.search(answer.text.decode()):
            self._outcome.restarts = int(float(found[1]))

    async def _request(self, tokens: int) -> float | None:
        """Seconds until a prompt of so many tokens was answered; None if it was not."""
        self._number += 1  # no prefix is in a cache
        prompt = [1 + (self._number * 7919 + index) % _IDS for index in range(tokens)]
        tokens_told = {"max_tokens": _TOKENS_TOLD, "min_tokens": _TOKENS_TOLD}
        body = {"model": "any", "prompt": prompt, "temperature": 0, **tokens_told}
        began = time.monotonic()
        try:
            url = f"{self._server.openai}/v1/completions"
            answer = await self._http.fetch("POST", url, {}, json.dumps(body).encode())
            if answer.status == 200 and json.loads(answer.text)["choices"][0]["finish_reason"]:
                return time.monotonic() - began
            what = f"HTTP {answer.status} {answer.text[:300]!r}"
        except TransportError as error:
            what = repr(error)
        self._outcome.errors.append(f"after {time.monotonic() - began:.1f} s: {what}")
        print(self._outcome.errors[-1], flush=True)
        await asyncio.sleep(_PAUSE_S)
        return None


async def _serve(options: argparse.Namespace, work: Path, outcome: Outcome) -> None:
    serve = ["--engine", "mock", "--tps", "50"]
    if options.engine != "mock":
        arguments = {"kv_cache_gb": 4, "max_num_batched_tokens": options.step_tokens}
        config = work / "serve.yaml"
        config.write_text(json.dumps({"tensorrt_llm": {"args": arguments}}))
        engine = build(work / "model", options.layers)
        serve = [str(engine), "--config", str(config)]
    os.environ |= {"SERVED_MODEL_NAME": "any", "TRITON_TIMEOUT": str(options.triton_timeout)}
    with serving(*serve, work_dir=work) as server:
        try:
            outcome.began = time.monotonic()
            load = Load(server, Client(_PATIENCE_S), outcome)
            await load.run(options.tokens, options.minutes * 60)
            await load.count()
        finally:
            outcome.ends = len(_ENDS.findall(server.log.read_text("utf-8")))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("engine", nargs="?", choices=("openvino", "mock"), default="openvino")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=100_000, help="of a prompt")
    parser.add_argument("--step-tokens", type=int, default=POSITIONS, help="of a step at most")
    parser.add_argument("--layers", type=int, default=1, help="of the model")
    parser.add_argument("--triton-timeout", type=float, default=1200, help="TRITON_TIMEOUT")
    options = parser.parse_args()
    if not 1 <= options.tokens <= _MOST_TOKENS:
        parser.error(f"--tokens {options.tokens}: must be from 1 to {_MOST_TOKENS}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="cog-triton-long-") as work:
        try:
            asyncio.run(_serve(options, Path(work), outcome))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    show(outcome.table())
    print("\n".join(outcome.errors))


if __name__ == "__main__":
    main()
