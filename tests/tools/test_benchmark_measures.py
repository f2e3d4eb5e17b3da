"""Measuring code of the benchmarks: waves, CPU and memory accounting, reports, baseline."""

import json
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import _resource_usage
import first_start
import hot_path
import pull_to_ready
import pytest
from _load import Wave, wave
from _report import Figure, Grid, Report
from against_commit import LoadCost
from scripted_server import Part, Request, serving, stream, whole

from cog_triton.bench.load_generator import GeneratorUsage
from cog_triton.bench.request_record import Record


def test_numbers_of_a_wave() -> None:
    load = GeneratorUsage(cpu=0.5, wall=2.0, lags=array("d", [0.001] * 98 + [0.003] * 2))
    streams = [Record(index=0, scheduled=0, output_tokens=count) for count in (2, 8)]
    streams[0].output(1.0, 1)
    streams[0].output(2.0, 1)
    streams[1].output(3.0, 4)
    both = Wave(streams, load)
    assert (both.tokens, both.events) == (10, 6)
    assert both.ttft_ms() == 2000
    assert both.itl_ms(100) == 1000
    assert both.itl_ms(50) == 0
    assert both.client_busy == 0.25
    cell = LoadCost(both, {"cog": 0.01, "stub a": 0.02, "stub b": 0.03, "others": 0.04})
    assert cell.us == pytest.approx(10_000)
    assert cell.costs() == pytest.approx([0, 0, 1000, 0, 0, 5000])
    assert LoadCost(both, {"cog": 0.0}).us > 0  # less than /proc counts; others are compared to it


def test_a_wave_over_real_sockets() -> None:
    prediction = {"status": "succeeded", "metrics": {"output_token_count": 5}}
    completed = b"event: completed\ndata: " + json.dumps(prediction).encode() + b"\n\n"
    output = b'event: output\ndata: {"chunk": "a"}\n\n'
    known = {"paths": {"/predictions": {"post": {"x-cog-streaming": True}}}}
    known["components"] = {"schemas": {"Input": {"properties": {"prompt": {}, "max_tokens": {}}}}}
    told = {"/openapi.json": known, "/health-check": {"status": "READY"}}

    def answer(request: Request) -> list[Part]:
        if request.path in told:
            return [whole(json.dumps(told[request.path]).encode())]
        return stream(output, output + output, completed)

    with serving(answer) as server:
        found = wave(server.url, {"prompt": "x"}, 2, 0.3)
    posted = [request for request in server.requests if request.body]
    assert {request.json["input"]["prompt"] for request in posted} == {"x"}
    assert len(found.streams) == len(posted) > 2
    assert all(sum(stream.counts) == 3 for stream in found.streams)
    assert found.tokens == 5 * len(posted)
    assert len(server._connections) >= len(posted)  # a new one for each request


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Does what it reads, a line of Python, and tells how much CPU it has had."""
    code = (
        "import sys, time\n"
        "for line in sys.stdin:\n"
        "    exec(line)\n"
        "    print(time.process_time(), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def do(child: subprocess.Popen[str], line: str) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    print(line, file=child.stdin, flush=True)
    return float(child.stdout.readline())


BURN = "until = time.thread_time() + 0.3\nwhile time.thread_time() < until: pass"


def test_cpu_of_a_child_includes_ended_threads(child: subprocess.Popen[str]) -> None:
    began = do(child, "pass")
    before = _resource_usage.cpu_seconds(child.pid)
    told = do(child, f"exec({BURN!r})")
    threaded = (
        f"import threading; t = threading.Thread(target=exec, args=({BURN!r}, {{'time': time}}))"
    )
    told = do(child, f"{threaded}; t.start(); t.join()")
    spent = _resource_usage.spent(before, _resource_usage.cpu_seconds(child.pid))
    assert told - began >= 0.6
    assert spent["others"] == pytest.approx(told - began, abs=0.04)


def test_use_of_a_child_is_its_own_code_and_its_wake_ups(child: subprocess.Popen[str]) -> None:
    do(child, "pass")
    before = _resource_usage.uses(child.pid)["others"]
    do(child, f"exec({BURN!r})")
    do(child, "for _ in range(30): time.sleep(0.001)")
    user, system, woken = _resource_usage.uses(child.pid)["others"]
    assert user + system - before.user - before.system >= 0.28
    assert woken - before.wake_ups >= 30


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ("run (asyncio/events.py:9);send (some/library.py:2)", "event loop, ASGI"),
        ("feed (/x/cog_triton/text/detokenize.py:7);decode (<frozen codecs>:3)", "text"),
        ("take (/x/cog_triton/serving/generation.py:1);dumps (/lib/json/__init__.py:2)", "JSON"),
        ("advance (cog_triton/serving/openai/sequences.py:3);new (x.py:1)", "generations"),
        ("wait (threading.py:3)", "others"),
    ],
)
def test_stacks_are_told_by_their_innermost_file(frames: str, what: str) -> None:
    assert hot_path.what_of(frames.split(";")).startswith(what)


def test_memory_of_a_child_grows_with_its_allocations(child: subprocess.Popen[str]) -> None:
    do(child, "pass")
    before = _resource_usage.memory_bytes(child.pid)["others"]
    do(child, "held = bytearray(b'x') * 50_000_000")
    grown = _resource_usage.memory_bytes(child.pid)["others"] - before
    assert 50_000_000 <= grown < 53_000_000


def test_files_of_proc_are_parsed() -> None:
    smaps = "0-1 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss: 8 kB\nPss_Anon: 3 kB\nPss_File: 4 kB\n"
    assert _resource_usage.own_bytes(smaps + "Pss_Shmem: 1 kB\n") == 4096
    assert _resource_usage.own_bytes("") == 0


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/x/bin/tritonserver --model-repository=m", "tritonserver"),
        ("/x/triton_python_backend_stub /r/tensorrt_llm/1/model.py shm", "stub tensorrt_llm"),
        ("python -m cog.server.http --host 127.0.0.1", "cog"),
        ("python -m cog_triton.front.server --listen PORT=3", "server"),
        ("python -m cog_triton.door", "door"),
        ("python -c import_coglet;coglet.server._run_worker()", "worker"),
        ("python -S -I /x/reaper.py -- python -m cog.server.http", "others"),
        ("python -m cog_triton serve --engine mock", "others"),
    ],
)
def test_command_lines_are_mapped_to_parts_of_a_server(line: str, part: str) -> None:
    assert _resource_usage.part_of([*line.split(" "), ""]) == part


def test_figures_are_judged_by_their_targets(tmp_path: Path) -> None:
    figures = [
        Figure("a", 4.0, "x", 4),
        Figure("b", 60.1, "us", 60),
        Figure("c", 3.0),
    ]
    assert [figure.verdict for figure in figures] == ["met", "missed", ""]
    report = Report("n", "title", figures, [Grid("t", ("x", "y"))], ["note"])
    report.grids[0].add("row", 1234.5)
    report.save(tmp_path / "new" / "n.json")
    saved = json.loads((tmp_path / "new" / "n.json").read_text())
    assert saved["grids"][0]["rows"] == [["row", "1234"]]
    assert saved["figures"][1]["verdict"] == "missed"
    assert report.summary().rows[1] == ["b", "60.1 us", "<= 60", "missed"]


def test_ways_of_an_image_are_compared_with_gzip() -> None:
    way = pull_to_ready.Way
    ways = {
        "gzip": [way(2.0, 6.0, 4.0, 1.0), way(4.0, 8.0, 4.0, 1.0), way(2.0, 6.0, 9.0, 1.0)],
        "zstd": [way(1.0, 3.0, 4.0, 1.0)] * 3,
        "zstd:chunked": [way(2.0, 6.0, 4.0, 1.0)] * 3,
    }
    pulls: dict[str, list[float | None]] = {name: [None] * 3 for name in ways}
    pulls["gzip"] = [7.0, 9.0, 8.0]
    sizes = {"gzip": 200, "zstd": 180, "zstd:chunked": 200}
    report = pull_to_ready.compared(sizes, ways, pulls, "20.10.24")
    found = {figure.name: figure.value for figure in report.figures}
    assert found["zstd: bytes / gzip"] == 0.9
    assert found["zstd: pull and unpack / gzip"] == 0.5
    assert found["zstd: total / gzip"] == pytest.approx(9 / 17)
    assert [row[-1] for row in report.grids[0].rows] == ["8.00", "refused", "refused"]


def test_phases_of_a_first_start_are_told_apart_by_its_lines() -> None:
    lines = [
        (0.5, "setup: [1/3] uv 0.13.9"),
        (2.0, "setup: [2/3] Python 3.11: /usr/bin/python3"),
        (2.5, "setup: [3/3] 106 locked packages"),
        (8.5, "setup: done in 8 s"),
        (9.0, "[check] build: OK"),
        (10.0, "[model] pypi:x"),
        (12.0, "Built engine.tar (153 MB)."),
        (17.0, "Ready in 4.8 s"),
    ]
    assert first_start.phases(lines) == [
        ("uv itself", "uv's", 1.5),
        ("Python", "uv's", 0.5),
        ("locked packages, and cog-triton", "uv's", 6.0),
        ("demo engine: check of its config", "ours", 1.5),
        ("demo engine: build", "ours", 2.0),
        ("start, with unpacking", "ours", 5.0),
    ]
