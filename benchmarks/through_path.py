"""Overhead of the serving path: Cog and Triton beside the same engine called in process.

Both sides hold the same engine, get the same prompts, and take turns within one run; an idle
engine uses no CPU. Prints the time to first token with the mock engine, which makes it at once, as
a prediction and over /v1; and tokens/s and TTFT of the OpenVINO pipeline of engine.tar at each
concurrency, and ratios.

    .venv/bin/python benchmarks/through_path.py [engine.tar]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import _load
import numpy as np
from _load_cost import QUICK_ACKS
from _mock_alone import MockAlone
from _report import Figure, Grid, Report, Target, main, say
from _servers import mock_server, server
from _streams import CHAT, PREDICTIONS, Api

from cog_triton.artifact import engine_tar
from cog_triton.text import prompts
from cog_triton.text.tokenizer import EngineTokenizer

PROMPT = "Explain to a child why the sky is blue."
SHORT = "Tell me about the sea."
ADDED, KEPT = Target(2), Target(0.97, least=True)
Wave = Callable[[int, int], "Round"]


@dataclass(frozen=True, slots=True)
class Round:
    """One wave of concurrent requests: aggregate tokens/s, median TTFT in milliseconds."""

    tokens_per_second: float
    ttft_ms: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:.1f} tok/s TTFT {self.ttft_ms:.1f} ms"


def in_process(connection: Connection, directory: Path) -> None:
    """Child process: answers (concurrency, tokens) with the values of a Round, until None."""
    from cog_triton.engines.openvino.engine import OpenVINOPipeline
    from cog_triton.engines.openvino.family import OpenVINOOptions
    from cog_triton.engines.request import EngineRequest
    from cog_triton.text.sampling import SamplingParams

    engine = OpenVINOPipeline(directory, OpenVINOOptions())
    tokenizer = EngineTokenizer.load(directory)

    def wave(concurrency: int, tokens: int) -> tuple[float, float]:
        started = time.perf_counter()
        first: dict[int, float] = {}
        count = 0
        for number in range(concurrency):
            text = prompts.render(
                PROMPT, None, request_template=None, default_template=None, tokenizer=tokenizer
            )
            ids = tokenizer.encode(text.text, add_special_tokens=text.add_special_tokens)
            sampling = SamplingParams(max_tokens=tokens, temperature=0)
            engine.submit(number, EngineRequest(input_ids=ids, sampling=sampling, end_id=-1))
        while engine.wait_s() is not None:
            for number, event in engine.step():
                if event.error:
                    raise event.error
                first.setdefault(number, time.perf_counter() - started)
                count += len(event.token_ids)
        elapsed = time.perf_counter() - started
        return count / elapsed, statistics.median(first.values()) * 1000

    connection.send("ready")
    while (job := connection.recv()) is not None:
        connection.send(wave(*job))


def through(url: str, concurrency: int, tokens: int) -> Round:
    """One wave of SSE predictions."""
    inputs = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    wave = _load.wave(url, inputs, concurrency)
    return Round(wave.tokens_per_second, wave.ttft_ms())


@contextmanager
def direct_engine(directory: Path) -> Iterator[Wave]:
    """The engine's pipeline in a child process, as a function that runs one wave."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=in_process, args=(theirs, directory), daemon=True)
    child.start()

    def wave(concurrency: int, tokens: int) -> Round:
        ours.send((concurrency, tokens))
        return Round(*ours.recv())

    try:
        ours.recv()
        yield wave
    finally:
        ours.send(None)
        child.join()


def openvino(args: argparse.Namespace, scratch: Path, report: Report) -> None:
    """Add the table and figures of engine.tar."""
    directory = args.engine
    if not directory.is_dir():
        directory = scratch / "engine"
        engine_tar.unpack(args.engine, directory)
    rounds: dict[int, list[tuple[Round, Round]]] = {}
    count, tokens = (1, 8) if args.quick else (args.rounds, args.tokens)
    with (
        direct_engine(directory) as direct_wave,
        server(str(directory), environment={"END_ID": "-1"}) as served_by,
    ):
        for concurrency in args.concurrency[: 1 if args.quick else None]:
            for number in range(count + 1):
                direct = direct_wave(concurrency, tokens)
                served = through(served_by.url, concurrency, tokens)
                say(f"{concurrency} streams: direct {direct}, served {served}")
                if number:  # the first wave warms up
                    rounds.setdefault(concurrency, []).append((direct, served))
    columns: tuple[str, ...] = ("streams", "direct tok/s", "served tok/s", "ratio")
    columns += ("direct TTFT ms", "served TTFT ms", "added ms")
    grid = Grid("OpenVINO in process (direct) and through Cog and Triton (served)", columns)
    median = statistics.median
    for concurrency, pairs in rounds.items():
        ratio = median(b.tokens_per_second / a.tokens_per_second for a, b in pairs)
        added = median(b.ttft_ms - a.ttft_ms for a, b in pairs)
        grid.add(
            concurrency,
            f"{median(a.tokens_per_second for a, _ in pairs):.1f}",
            f"{median(b.tokens_per_second for _, b in pairs):.1f}",
            f"{ratio:.3f}",
            f"{median(a.ttft_ms for a, _ in pairs):.1f}",
            f"{median(b.ttft_ms for _, b in pairs):.1f}",
            f"{added:.1f}",
        )
        target = ADDED if concurrency == 1 else None
        name = f"OpenVINO, {concurrency} streams"
        report.figures.append(Figure(f"{name}: tok/s served / direct", ratio, "x", KEPT))
        report.figures.append(Figure(f"{name}: TTFT added", added, "ms", target))
    report.grids.append(grid)


def first_tokens(args: argparse.Namespace, report: Report) -> None:
    """Add the TTFT with the mock engine: requests one after another, in turns."""
    turns, each, pause = (2, 5, 0.0) if args.quick else (10, 20, 0.3)
    ways: dict[str, tuple[Api, bool]] = {
        "": (PREDICTIONS, False),
        ", plain client": (PREDICTIONS, True),
        ", /v1": (CHAT, False),
    }
    direct: list[float] = []
    served: dict[str, list[float]] = {name: [] for name in ways}
    mock = MockAlone()
    with mock_server() as running:
        inputs = {"prompt": SHORT, "max_tokens": 1}
        for api, _ in ways.values():
            _load.wave(running.base(api), inputs, 1, api=api)
        for _ in range(turns):
            direct += [mock.ttft_ms() for _ in range(each)]
            for name, (api, plain) in ways.items():
                wave = _load.wave(running.base(api), inputs, 1, pause, plain=plain, api=api)
                served[name] += [stream.ttft * 1000 for stream in wave.streams]
    columns = ("", "requests", "p50", "p90", "p99")
    grid = Grid("mock engine: milliseconds to the first token, one stream", columns)
    for name, times in {"direct": direct, **{f"served{n}": t for n, t in served.items()}}.items():
        cuts = (f"{float(np.percentile(times, cut)):.2f}" for cut in (50, 90, 99))
        grid.add(name, len(times), *cuts)
    report.grids.append(grid)
    for name, (_, plain) in ways.items():
        added = statistics.median(served[name]) - statistics.median(direct)
        target = None if plain else ADDED
        report.figures.append(Figure(f"mock, 1 stream{name}: TTFT added", added, "ms", target))
    report.notes.append(QUICK_ACKS)


def run(args: argparse.Namespace) -> Report:
    """Measure the mock, and engine.tar if there is one."""
    report = Report("through_path", "the same engine in process and through Cog and Triton")
    first_tokens(args, report)
    if args.engine:
        with tempfile.TemporaryDirectory() as scratch:
            openvino(args, Path(scratch), report)
    else:
        report.notes.append("no engine.tar was given: the mock engine only")
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, nargs="?", help="engine.tar or engine directory")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=5, help="waves of each side")


if __name__ == "__main__":
    main("through_path", __doc__, run, arguments)
