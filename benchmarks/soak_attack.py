"""Attack soak: hostile clients on every published port, with control predictions beside them.

    .venv/bin/python benchmarks/soak_attack.py [engine.tar] --inputs 20000
    .venv/bin/python benchmarks/soak_attack.py [engine.tar] --stop

Starts a server (the mock engine by default), attacks it, and fails when a process died of an input
(told by start times, not by answers), an answer is 5xx without a code, a control prediction came
back with other text, or memory stays above what it was by more than --growth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from _attack_inputs import PORTS, Inputs, chunked, deep, request
from _servers import Server, mock_server, server
from _stopped_processes import stop_each

from cog_triton.system import reaper

CONTROL = {"input": {"prompt": "rivers run to the seas", "max_tokens": 40, "temperature": 0}}
ANSWER_S = 10.0
FUZZ_ANSWER_S = 1.5
MAX_ANSWER = 1 << 20
SETTLE_S = 30.0
DISPOSABLE = ("cog_triton.text.template_child", "cog_triton.door.large_bodies_child")
"""Processes that do one request's work within limits: their end is that of the request alone."""
_CODE = re.compile(rb"E[12]\d{3} ")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass
class Findings:
    """What the attack brought; `uncoded` has an example of each kind."""

    answers: Counter[str] = field(default_factory=Counter)
    uncoded: dict[str, bytes] = field(default_factory=dict)
    controls: Counter[str] = field(default_factory=Counter)

    def take(self, kind: str, answer: bytes) -> None:
        """Count the answer to one hostile input."""
        match = _STATUS.match(answer)
        status = match[1].decode() if match else "closed"
        self.answers[f"{kind} {status}"] += 1
        if status.startswith("5") and not _CODE.search(answer):
            self.uncoded.setdefault(f"{kind} {status}", answer[:300])


def processes(root: int) -> dict[tuple[int, int], str]:
    """(PID, start time in ticks) -> command of each process of the server."""
    found = {}
    for pid in (root, *reaper.descendants(root)):
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            found[pid, int(stat.split()[19])] = command.decode("utf-8", "replace")[:90]
    return found


async def send(port: int, data: bytes, wait: float = ANSWER_S) -> bytes:
    """Send bytes on a connection of their own; what comes back within `wait` seconds."""
    answer = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return answer
    try:
        for start in range(0, len(data), 1 << 16):
            writer.write(data[start : start + (1 << 16)])
            await asyncio.wait_for(writer.drain(), wait)
        deadline = time.monotonic() + wait
        while len(answer) < MAX_ANSWER:
            more = await asyncio.wait_for(reader.read(1 << 16), deadline - time.monotonic())
            if not more:
                break
            answer += more
    except (OSError, asyncio.TimeoutError):
        pass
    finally:
        writer.close()
    return answer


@asynccontextmanager
async def controls(target: Server, findings: Findings) -> AsyncIterator[None]:
    """Predictions, one after the other, whose text must not change whatever happens beside."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=target.url, timeout=60) as http:
            expected = None
            while True:
                try:
                    answer = (await http.post("/predictions", json=CONTROL)).json()
                except (httpx.HTTPError, ValueError) as error:
                    findings.controls[f"wrong: {type(error).__name__}"] += 1
                    await asyncio.sleep(0.1)
                    continue
                text = "".join(answer.get("output") or [])
                if answer.get("status") == "succeeded":
                    expected = expected or text
                    findings.controls["right" if text == expected else "wrong: other text"] += 1
                else:
                    known = re.search(r"E\d{4}", json.dumps(answer))
                    findings.controls[known[0] if known else f"wrong: {answer}"[:200]] += 1
                await asyncio.sleep(0.02)

    task = asyncio.ensure_future(run())
    try:
        yield
    finally:
        task.cancel()


async def idle_connections(ports: dict[str, int], findings: Findings, count: int = 1000) -> None:
    """`count` connections that send nothing, spread over the ports; newcomers must be served."""
    opened = []
    for number in range(count):
        with suppress(OSError):
            opened.append(
                await asyncio.open_connection(
                    "127.0.0.1", list(ports.values())[number % len(ports)]
                )
            )
    findings.answers["idle opened"] += len(opened)
    newcomer = await send(ports["cog"], request("GET", "/health-check"))
    findings.answers["newcomer READY" if b'"READY"' in newcomer else "newcomer REFUSED"] += 1
    for _, writer in opened:
        writer.close()


async def half_sent(ports: dict[str, int], findings: Findings, count: int = 300) -> None:
    """Requests that stop half-way (slow-loris)."""
    opened = []
    for number in range(count):
        port = list(ports.values())[number % len(ports)]
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /predictions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-le")
            opened.append((reader, writer))
    newcomer = await send(ports["cog"], request("GET", "/health-check"))
    findings.answers["newcomer READY" if b'"READY"' in newcomer else "newcomer REFUSED"] += 1
    for _, writer in opened:
        writer.close()


async def slow_readers(ports: dict[str, int], findings: Findings, count: int = 20) -> None:
    """Streams whose clients do not read."""
    body = json.dumps({"input": {"prompt": "rivers", "max_tokens": 4000}}).encode()
    data = request("POST", "/predictions", body, "Accept: text/event-stream")
    opened = []
    for _ in range(count):
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", ports["cog"], limit=1024)
            writer.write(data)
            opened.append((reader, writer))
    await asyncio.sleep(3)
    findings.answers["slow readers"] += len(opened)
    for _, writer in opened:
        writer.transport.abort()


async def known_attacks(ports: dict[str, int], findings: Findings) -> None:
    """Requests that have killed a tritonserver or mapped its memory (security.md)."""
    generate = "/v2/models/ensemble/generate"
    paths = (generate, "/v2/models/ensemble/infer", "/v2/repository/index", "/v2/logging")
    paths += ("/v2/trace/setting", "/v2/systemsharedmemory/region/evil/register")
    for name, port in ports.items():
        for path in (*paths, "/predictions", "/v1/chat/completions"):
            findings.take(f"deep {name}", await send(port, request("POST", path, deep(200_000))))
        findings.take(f"chunks {name}", await send(port, chunked(generate, 1_000_000), 60))
        findings.take(
            f"headers {name}", await send(port, b"GET / HTTP/1.1\r\na: " + b"b" * (40 << 20))
        )
    many = b'{"input":{"messages":[%b0]}}' % (b"0," * 4_000_000)  # coglet took 7 GB for it
    findings.take("messages", await send(ports["cog"], request("POST", "/predictions", many)))
    outputs = [{"name": "OUTPUT", "parameters": {"classification": 2147483647}}]
    inputs = [{"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1], "data": [1]}]
    body = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    infer = request("POST", "/v2/models/postprocessing/infer", body)
    findings.take("classification", await send(ports["triton"], infer))
    for path, value in (
        ("/v2/systemsharedmemory/region/evil/register", {"key": "/x", "offset": 0, "byte_size": 1}),
        ("/v2/logging", {"log_verbose_level": 9}),
        ("/v2/repository/models/ensemble/unload", {}),
        ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    ):
        answer = await send(ports["triton"], request("POST", path, json.dumps(value).encode()))
        findings.take(f"control {path.split('/')[2]}", answer)
        if answer.startswith(b"HTTP/1.1 200"):
            findings.uncoded[f"{path} is published"] = answer[:200]


async def fuzz(ports: dict[str, int], findings: Findings, count: int, seed: int) -> None:
    """`count` mutated requests over all ports, 16 at a time."""
    inputs, left = Inputs(seed), iter(range(count))

    async def some() -> None:
        for _ in left:
            name, data = inputs.next()
            findings.take(f"fuzz {name}", await send(ports[name], data, FUZZ_ANSWER_S))

    await asyncio.gather(*(some() for _ in range(16)))


async def attack(target: Server, options: argparse.Namespace) -> Findings:
    """Run every attack once, and the fuzz inputs."""
    findings = Findings()
    urls = (target.url, target.openai, target.triton, target.metrics)
    ports = {name: int(urlsplit(url).port or 0) for name, url in zip(PORTS, urls, strict=True)}
    attacks: tuple[Callable[[], Awaitable[None]], ...] = (
        lambda: known_attacks(ports, findings),
        lambda: idle_connections(ports, findings),
        lambda: half_sent(ports, findings),
        lambda: slow_readers(ports, findings),
        lambda: fuzz(ports, findings, options.inputs, options.seed),
    )
    async with controls(target, findings):
        for each in attacks:
            await each()
        await asyncio.sleep(1)
    return findings


def settled_memory(target: Server, limit: float) -> dict[str, int]:
    """Bytes of each part, once all are below `limit` or SETTLE_S has passed."""
    deadline = time.monotonic() + SETTLE_S
    while sum((used := target.memory_bytes()).values()) > limit and time.monotonic() < deadline:
        time.sleep(1)
    return used


def main() -> None:
    """Attack, print what happened, and exit with 1 if anything did that must not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", nargs="?", help="engine.tar; default the mock engine")
    parser.add_argument("--inputs", type=int, default=20_000, help="fuzz inputs")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the fuzz inputs")
    parser.add_argument(
        "--stop",
        nargs="?",
        const="",
        metavar="ROLE",
        help="instead, SIGSTOP each process whose role contains this, on servers of their own",
    )
    parser.add_argument("--growth", type=float, default=1.2, help="memory after, by that before")
    options = parser.parse_args()

    def start() -> AbstractContextManager[Server]:
        return server(options.engine) if options.engine else mock_server(tps=200)

    if options.stop is not None:
        outcomes = asyncio.run(stop_each(start, options.stop))
        failed = not outcomes or any(outcome.failed for outcome in outcomes)
        print("stops: FAILED" if failed else "stops: nothing was lost without a code")
        sys.exit(failed)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with start() as target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        asyncio.run(warm_up(target))
        before, parts = processes(target.pid), target.memory_bytes()
        memory = sum(parts.values())
        findings = asyncio.run(attack(target, options))
        after = processes(target.pid)
        parts_left = settled_memory(target, memory * options.growth)
        left = sum(parts_left.values())
    gone = [command for key, command in before.items() if key not in after]
    replaced = [command for command in gone if any(name in command for name in DISPOSABLE)]
    died = [command for command in gone if command not in replaced]
    for kind, count in sorted(findings.answers.items()):
        print(f"{count:7d}  {kind}")
    for kind, count in sorted(findings.controls.items()):
        print(f"{count:7d}  control {kind}")
    for kind, example in sorted(findings.uncoded.items()):
        print(f"uncoded: {kind}: {example!r}")
    print(f"memory: {memory / 1e6:.0f} MB before, {left / 1e6:.0f} MB after")
    for part, used in sorted(parts_left.items()):
        print(f"    {part}: {parts.get(part, 0) / 1e6:.0f}, {used / 1e6:.0f} MB")
    print(f"replaced, as they may be: {replaced or 'none'}")
    print(f"died: {died or 'none'}")
    wrong = [kind for kind in findings.controls if kind.startswith("wrong")]
    refused = findings.answers["newcomer REFUSED"]
    failed = bool(died or wrong or findings.uncoded or refused or left > memory * options.growth)
    print("attack: FAILED" if failed else "attack: nothing fell")
    os._exit(1) if failed else sys.exit(0)


async def warm_up(target: Server) -> None:
    """Some work of every kind, so that memory is compared with that of a server in use."""
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(20):
            await http.post(f"{target.url}/predictions", json=CONTROL)
            await http.get(f"{target.openai}/v1/models")
            await http.get(f"{target.triton}/v2/models/ensemble/config")


if __name__ == "__main__":
    main()
