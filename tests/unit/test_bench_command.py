"""``cog-triton bench`` as a process, against a scripted server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ran
from scripted_server import HANG, ScriptedServer, serving, whole
from test_bench_targets import STREAM, USUAL, by_path, of_cog

from cog_triton.bench import load_generator
from cog_triton.system.ports import free_ports

BENCH = [sys.executable, "-m", "cog_triton", "bench", "--url"]
ENDLESS = ["--warmup", "0", "--unit", "concurrency", "--rate", "1", "--duration", "60"]
FULL = [whole(b'{"detail": "busy"}', "409 Conflict")]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(by_path(of_cog(*USUAL), STREAM)) as found:
        yield found


def run(*arguments: object) -> tuple[int, str]:
    result = ran("bench", *arguments, columns=400)
    return result.exit_code, result.output


def test_the_command_line_of_the_original(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", server.url.rpartition(":")[2])
    line = (
        "--unit batch --duration 0.2 --tps 100 --n-output-tokens 128 --output-method yield --rate 6"
    )
    code, said = run(*line.split())
    assert code == 0
    assert "Load: 6 batch on cog-triton at " in said
    assert "Requests: 6 completed, 0 failed" in said
    assert "--tps is not sent: the server has no such input." in said


def test_a_json_file_is_written(server: ScriptedServer, tmp_path: Path) -> None:
    code, _ = run(
        *("--url", server.url, "--unit", "concurrency", "--rate", 2, "--requests", 6),
        *("--json", tmp_path / "a.json"),
        *("--n-input-tokens", "uniform:3-5", "--input", "max_tokens=7"),
    )
    assert code == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["runs"][0]["completed"] == 6
    posted = [request.json["input"] for request in server.requests if request.body]
    assert len(posted) == 7  # one warms up
    assert {item["max_tokens"] for item in posted} == {7}
    assert all(3 <= len(item["prompt"].split()) <= 5 for item in posted)
    assert len({item["prompt"] for item in posted}) > 3


def test_json_on_stdout_has_the_report_on_stderr(server: ScriptedServer) -> None:
    done = subprocess.run(
        [*BENCH, server.url, *["--requests", "2", "--rate", "50", "--json", "-"]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["runs"][0]["completed"] == 2
    assert "Requests: 2 completed, 0 failed" in done.stderr


def test_a_run_without_success_reports_and_exits_with_the_reason() -> None:
    with serving(by_path(of_cog(*USUAL), FULL)) as server:
        arguments = ("--url", server.url, "--requests", 3, "--rate", 50, "--warmup", 0)
        code, said = run(*arguments)
    assert code == 1
    assert "HTTP 409: 3, such as: {" in said
    assert "E2400 NothingSucceeded: no request succeeded; HTTP 409" in said


def test_a_failed_warm_up_request_ends_the_run() -> None:
    with serving(by_path(of_cog(*USUAL), FULL)) as server:
        code, said = run("--url", server.url, "--requests", 3)
    assert code == 1
    assert "E2400 NothingSucceeded: the request that warms up failed (HTTP 409)" in said
    assert "Requests: " not in said


def test_ctrl_c_reports_the_requests_so_far() -> None:
    parts = [*STREAM[:2], HANG]

    def answer(request: object) -> list[object]:
        path = getattr(request, "path", "")
        posted = sum(bool(item.body) for item in server.requests)
        known = of_cog(*USUAL)
        return [known[path]] if path in known else STREAM if posted <= 2 else parts

    with serving(answer) as server:  # type: ignore[arg-type]
        process = subprocess.Popen(
            [*BENCH, server.url, *ENDLESS],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            arrived(server, 5)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert "Requests: interrupted; 2 completed, 0 failed, 1 cut off" in said


def arrived(server: ScriptedServer, count: int) -> None:
    """Wait for that many requests, past the start of a process on a busy machine."""
    deadline = time.monotonic() + 60
    while len(server.requests) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_progress_is_a_line(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_generator, "_PROGRESS_S", 0.1)
    _, said = run("--url", server.url, *ENDLESS[:-1], "1")
    assert re.search(r"(?m)^1 concurrency: [01] of 1 s: \d+ done, [01] running, \d+ output", said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--n-input-tokens 0", "E1005 InvalidArgument: --n-input-tokens='0': must be N or uniform"),
        ("--rate 0", "--rate=0.0: must be above 0"),
        ("--input x", "--input='x': must be NAME=VALUE"),
        ("--json /nowhere/x.json", "--json='/nowhere/x.json': its directory does not exist"),
        ("--tokenizer /nowhere", "was removed: use aiperf"),
        ("--url localhost:5000", "--url='localhost:5000': must be http(s)://"),
    ],
)
def test_invalid_options_are_refused_by_name(arguments: str, says: str) -> None:
    code, said = run(*arguments.split())
    assert code == 1
    assert says in said
    assert "Traceback" not in said


def test_an_unreachable_server_is_reported_before_any_load() -> None:
    (port,) = free_ports(1)
    code, said = run("--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert f"E1400 TargetUnavailable: cog-triton at http://127.0.0.1:{port}: cannot connect" in said
    assert "start it with: cog-triton serve engine.tar" in said
