"""Cog -> Triton -> engine against the same OpenVINO pipeline called in process.

Both sides hold the same engine, get the same prompts, and take turns within one run; an idle
engine uses no CPU. Prints tokens/s and TTFT at each concurrency, and their ratios.

    .venv/bin/python benchmarks/through_path.py engine.tar
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from cog_triton import engine_tar, prompts, reaper
from cog_triton.settings import free_ports
from cog_triton.tokenizer import EngineTokenizer

PROMPT = "Explain to a child why the sky is blue, number {number}."


@dataclass(frozen=True, slots=True)
class Round:
    """One wave of concurrent requests: aggregate tokens/s, median TTFT in milliseconds."""

    tokens_per_second: float
    ttft_ms: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:.1f} tok/s TTFT {self.ttft_ms:.1f} ms"


def in_process(connection: Connection, directory: Path) -> None:
    """Child process: answers (concurrency, tokens) with a Round, until None."""
    from cog_triton.engines.base import EngineRequest
    from cog_triton.engines.openvino import OpenVINOOptions
    from cog_triton.engines.openvino_pipeline import OpenVINOPipeline
    from cog_triton.sampling import SamplingParams

    engine = OpenVINOPipeline(directory, OpenVINOOptions())
    tokenizer = EngineTokenizer.load(directory)

    def wave(concurrency: int, tokens: int) -> Round:
        started = time.perf_counter()
        first: dict[int, float] = {}
        count = 0
        for number in range(concurrency):
            text = prompts.render(
                PROMPT.format(number=number),
                None,
                request_template=None,
                default_template=None,
                tokenizer=tokenizer,
            )
            ids = tokenizer.encode(text.text, add_special_tokens=text.add_special_tokens)
            sampling = SamplingParams(max_tokens=tokens, temperature=0)
            engine.submit(number, EngineRequest(input_ids=ids, sampling=sampling, end_id=-1))
        while engine.live:
            for number, event in engine.step():
                if event.error:
                    raise event.error
                first.setdefault(number, time.perf_counter() - started)
                count += len(event.token_ids)
        elapsed = time.perf_counter() - started
        return Round(count / elapsed, statistics.median(first.values()) * 1000)

    connection.send("ready")
    while (job := connection.recv()) is not None:
        connection.send(wave(*job))


async def through(port: int, concurrency: int, tokens: int) -> Round:
    """One wave of SSE predictions."""
    started = time.perf_counter()

    async def one(number: int) -> tuple[int, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(
            {
                "input": {
                    "prompt": PROMPT.format(number=number),
                    "max_tokens": tokens,
                    "temperature": 0,
                }
            }
        ).encode()
        writer.write(
            b"POST /predictions HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        first = 0.0
        answer = b""
        while chunk := await reader.read(65536):
            answer += chunk
            if not first and b"event: output" in answer:
                first = time.perf_counter() - started
        writer.close()
        _, found, rest = answer.partition(b"event: completed\ndata: ")
        completed = json.loads(rest.splitlines()[0]) if found else {}
        if completed.get("status") != "succeeded":
            raise RuntimeError(f"a prediction failed: {answer.decode()}")
        return completed["metrics"]["output_token_count"], first

    results = await asyncio.gather(*(one(number) for number in range(concurrency)))
    elapsed = time.perf_counter() - started
    return Round(
        sum(count for count, _ in results) / elapsed,
        statistics.median(first for _, first in results) * 1000,
    )


def serve(engine: Path, work_dir: Path) -> tuple[reaper.Reaped, int]:
    """Start `cog-triton serve` on free ports and wait until it is ready."""
    port, http, grpc, metrics = free_ports(4)
    process = reaper.spawn(
        [
            sys.executable,
            "-m",
            "cog_triton",
            "serve",
            str(engine),
            f"--port={port}",
            f"--triton-http-port={http}",
            f"--triton-grpc-port={grpc}",
            f"--triton-metrics-port={metrics}",
        ],
        env={**os.environ, "COG_TRITON_WORK_DIR": str(work_dir), "END_ID": "-1"},
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None:
        try:
            if json.load(urlopen(f"http://127.0.0.1:{port}/health-check"))["status"] == "READY":
                return process, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit("cog-triton serve did not start")


def main() -> None:
    """Run the waves and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine.tar or engine directory")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=7, help="waves of each side")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.engine
        if not directory.is_dir():
            directory = Path(scratch) / "engine"
            engine_tar.unpack(args.engine, directory)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=in_process, args=(theirs, directory), daemon=True)
        child.start()
        ours.recv()
        server, port = serve(directory, Path(scratch) / "work")
        rounds: dict[int, list[tuple[Round, Round]]] = {}
        try:
            for concurrency in args.concurrency:
                for number in range(args.rounds + 1):
                    ours.send((concurrency, args.tokens))
                    direct = ours.recv()
                    served = asyncio.run(through(port, concurrency, args.tokens))
                    print(
                        f"{concurrency} streams: direct {direct}, served {served}", file=sys.stderr
                    )
                    if number:  # the first wave warms up
                        rounds.setdefault(concurrency, []).append((direct, served))
        finally:
            ours.send(None)
            server.terminate()
            server.wait()
            child.join()
    report(rounds)
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    str(concurrency): [
                        {
                            "in_process": [direct.tokens_per_second, direct.ttft_ms],
                            "served": [served.tokens_per_second, served.ttft_ms],
                        }
                        for direct, served in pairs
                    ]
                    for concurrency, pairs in rounds.items()
                }
            )
        )


def report(rounds: dict[int, list[tuple[Round, Round]]]) -> None:
    """Print medians over the rounds; the ratio is the median of each round's own ratio."""
    table = Table(title="same engine in process (direct) and through Cog and Triton (served)")
    for name in ("streams", "direct tok/s", "served tok/s", "ratio"):
        table.add_column(name, justify="right")
    for name in ("direct TTFT ms", "served TTFT ms", "added ms"):
        table.add_column(name, justify="right")
    for concurrency, pairs in rounds.items():
        median = statistics.median
        table.add_row(
            str(concurrency),
            f"{median(a.tokens_per_second for a, _ in pairs):.1f}",
            f"{median(b.tokens_per_second for _, b in pairs):.1f}",
            f"{median(b.tokens_per_second / a.tokens_per_second for a, b in pairs):.3f}",
            f"{median(a.ttft_ms for a, _ in pairs):.1f}",
            f"{median(b.ttft_ms for _, b in pairs):.1f}",
            f"{median(b.ttft_ms - a.ttft_ms for a, b in pairs):.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
