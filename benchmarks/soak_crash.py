"""Crash soak: kills and stops server processes under 32 streams, and counts leaks.

    .venv/bin/python benchmarks/soak_crash.py engine.tar --rounds 20

Each round waits until the streams stream, strikes, and tells how every request ended, how long
the slowest took to end, and how long the server took to be READY. It fails when a request ends
in neither text nor a code, when a time is longer than allowed, or when processes, shared memory,
ports or file descriptors grow.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

import httpx
from served import Counts, Server, read

from cog_triton import errors

STUBS = ("tensorrt_llm", "tensorrt_llm_bls", "preprocessing", "postprocessing")
SETTLE_S = 10.0


async def one(
    http: httpx.AsyncClient, number: int, flowing: set[int], max_tokens: int = 3000
) -> str:
    """Run one stream; returns how it ended: ``text``, a code, or a description."""
    body = {"input": {"prompt": f"Tell me {number} long stories.", "max_tokens": max_tokens}}
    last = ""
    try:
        async with http.stream(
            "POST", "/predictions", json=body, headers={"Accept": "text/event-stream"}, timeout=300
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last = line
                elif line == "event: output":
                    flowing.add(number)
            if response.status_code != 200:
                return f"HTTP {response.status_code}"
    except httpx.HTTPError as error:
        return repr(error)
    error = errors.from_text(last)
    return error.code if error else "text" if '"status":"succeeded"' in last else last[-200:]


async def until(condition: object, seconds: float) -> float:
    """Wait until `condition`, a coroutine function, holds; returns the seconds it took."""
    began = time.monotonic()
    while not await condition():  # type: ignore[operator]
        if time.monotonic() - began > seconds:
            raise SystemExit(f"not so within {seconds:g} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def strike(
    server: Server,
    http: httpx.AsyncClient,
    program: str,
    number: int,
    options: argparse.Namespace,
) -> tuple[Counter[str], float, float]:
    """Run one round; returns how requests ended, the longest wait, and the time to READY."""
    flowing: set[int] = set()
    ready_at = time.monotonic()

    async def streaming() -> bool:
        lived = time.monotonic() - ready_at
        return len(flowing) >= min(options.streams, 16) and lived > options.life

    requests = [asyncio.create_task(one(http, n, flowing)) for n in range(options.streams)]
    await until(streaming, 120)
    os.kill(server.pid_of(program), number)
    struck = time.monotonic()
    ended: list[float] = []
    for request in requests:
        request.add_done_callback(lambda _: ended.append(time.monotonic() - struck))

    async def ready() -> bool:
        return bool(server.pid_of(program)) and await server.ready(http)

    async def unready() -> bool:
        return not await server.ready(http)

    await until(unready, 60)
    await until(ready, 120)
    to_ready = time.monotonic() - struck
    outcomes = Counter(await asyncio.gather(*requests))
    return outcomes, max(ended), to_ready


async def soak(server: Server, options: argparse.Namespace) -> list[str]:
    """Run all rounds; returns what went wrong."""
    wrong = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    base = f"http://127.0.0.1:{server.port}"
    kinds = {
        "kill-server": (["tritonserver"], signal.SIGKILL),
        "kill-stub": (list(STUBS), signal.SIGKILL),
        "stop-server": (["tritonserver"], signal.SIGSTOP),
        "stop-stub": (list(STUBS), signal.SIGSTOP),
    }
    async with httpx.AsyncClient(base_url=base, limits=limits, trust_env=False) as http:
        await until(lambda: server.ready(http), 120)
        await asyncio.gather(*(one(http, n, set(), 4) for n in range(options.streams)))
        await asyncio.sleep(1)
        before = server.counts()
        print(f"before: {before}", flush=True)
        for kind in options.kinds.split(","):
            programs, number = kinds[kind]
            for place, program in zip(range(options.rounds), cycle(programs), strict=False):
                outcomes, end, ready = await strike(server, http, program, number, options)
                counts = await _settled(server, before)
                said = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
                print(
                    f"{kind} {place + 1} ({program}): {said}; last ended after {end:.2f} s,"
                    f" READY after {ready:.2f} s (load {os.getloadavg()[0]:.1f});"
                    f" {counts}",
                    flush=True,
                )
                where = f"{kind} {place + 1}"
                if outcomes.keys() - {"text", "E2105", "E2107"}:
                    wrong.append(f"{where}: {said}")
                if end > options.end_limit or ready > options.ready_limit:
                    wrong.append(f"{where}: ended after {end:.2f} s, READY after {ready:.2f} s")
                if not counts.within(before):
                    wrong.append(f"{where}: {counts}; before: {before}")
    return wrong


async def _settled(server: Server, before: Counts) -> Counts:
    deadline = time.monotonic() + SETTLE_S
    while not (counts := server.counts()).within(before) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return counts


def main() -> int:
    """Run the soak; returns 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", help="engine.tar or engine directory")
    parser.add_argument("--rounds", type=int, default=20, help="of each kind; 20")
    parser.add_argument("--streams", type=int, default=32, help="at once; 32")
    parser.add_argument("--kinds", default="kill-server,kill-stub,stop-server,stop-stub")
    parser.add_argument(
        "--life",
        type=float,
        default=5.5,
        help="seconds of readiness before each strike; less than 5 is a crash loop; 5.5",
    )
    parser.add_argument("--end-limit", type=float, default=5, help="seconds for a request; 5")
    parser.add_argument("--ready-limit", type=float, default=15, help="seconds until READY; 15")
    options = parser.parse_args()
    os.environ.setdefault("RESUME", "0")  # else the streams go on, and outlive the round
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work_dir:
        server = Server(options.engine, work_dir)
        wrong: list[str] = []
        try:
            wrong = asyncio.run(soak(server, options))
        finally:
            pids = server.pids
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
            left = [pid for pid in pids if read(pid, "cmdline")]
            shared = [
                path.name
                for path in Path("/dev/shm").iterdir()
                if path.name.startswith(tuple(f"cog_triton_{pid}_" for pid in pids))
            ]
            print(f"stopped with {code}; left: {len(left)} processes, {len(shared)} in /dev/shm")
    if code or left or shared:
        wrong.append(f"the server ended with {code} and left {left} {shared}")
    print("\n".join(["WRONG:", *wrong]) if wrong else "nothing was wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
