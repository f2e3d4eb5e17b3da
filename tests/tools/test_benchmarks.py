"""What benchmarks measure by, and a run of each on real servers; measuring is for `make bench`.

Servers that do not differ are one: each script runs in this process, and gets a server that is
there already where it would start another one like it. `start_up` starts its own.
"""

import argparse
import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _report
import _resource_usage
import _servers
import against
import against_commit
import pytest
import soak
from _load import Wave
from _servers import Server
from against_commit import LoadCost
from stack import REPOSITORY

from cog_triton.bench.load_generator import GeneratorUsage
from cog_triton.bench.request_record import Record

pytestmark = pytest.mark.integration

SCRIPTS = REPOSITORY / "benchmarks"


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with _servers.mock_server() as server:
        yield server


SHARED = {"hot_path": {"mock_server": "ours"}, "memory": {"mock_server": "ours"}}
"""Which fixture a script gets in place of a server of its own."""


def instead_of(real: Callable[..., Any], server: Server) -> Callable[..., Any]:
    """Takes the arguments of `real`, and has `server` already."""

    def given(*args: Any, **kwargs: Any) -> AbstractContextManager[Server]:
        inspect.signature(real).bind(*args, **kwargs)
        return nullcontext(server)

    return given


@pytest.mark.parametrize("name", ["hot_path", "memory", "start_up"])
def test_benchmark_runs_and_prints_its_figures(
    name: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for function, fixture in SHARED.get(name, {}).items():
        real = getattr(_servers, function)
        server = request.getfixturevalue(fixture)
        monkeypatch.setattr(_servers, function, instead_of(real, server))
    monkeypatch.setenv("COG_TRITON_WORK_DIR", str(tmp_path / "work"))
    result = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [name, "--quick", f"--json={result}"])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    found = json.loads(result.read_text())
    assert found["name"] == name
    assert found["machine"]
    for figure in found["figures"]:
        assert figure["name"] in said
        assert (figure["verdict"] == "") == (figure["target"] is None)
    assert found["figures"]
    assert all(grid["rows"] for grid in found["grids"])


def test_a_commit_is_measured_beside_this_tree(
    ours: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_servers, "mock_server", instead_of(_servers.mock_server, ours))
    monkeypatch.setattr(against_commit, "checkout", lambda ref: tmp_path / ref)
    report = against_commit.run(argparse.Namespace(ref="other", quick=True))
    assert {row[1] for row in report.grids[0].rows} == {"this tree", "other"}
    targets = {None, against_commit.MOST, against_commit.OF_PREDICTIONS}
    assert {figure.target for figure in report.figures} == targets
    assert all(0.1 < figure.value < 10 for figure in report.figures if figure.target)


def test_two_servers_are_compared_by_url(ours: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["against", ours.openai, f"--ours={ours.openai}", "--streams=2", "--quick"]
    monkeypatch.setattr(sys, "argv", [*words, f"--json={os.devnull}"])
    report = _report.main("against", "", against.run, against.arguments)
    assert [row[1] for row in report.grids[0].rows] == ["ours", "the peer"]
    ratios = {figure.name.partition(" (")[0]: figure.value for figure in report.figures}
    assert 0.05 < ratios["2 streams: TTFT p50, ms"] < 20
    assert 0.05 < ratios["2 streams: tokens/s"] < 20


def test_the_last_release_is_the_newest_that_is_not_this_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against_commit, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    commits = []
    for version in ("1.1.0", "1.2.0"):
        words = [*git, "commit", "-q", "--allow-empty", "-m", f"Cut {version}"]
        subprocess.run(words, check=True)
        commits.append(subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip())
    versions = "## 1.2.0 - 2026-01-02\n## 1.1.0 - x\n"
    for text, commit in ((f"- A change.\n\n{versions}", commits[1]), (versions, commits[0])):
        (tmp_path / "CHANGELOG.md").write_text(f"## Unreleased\n\n{text}")
        assert against_commit.last_release() == commit


def test_a_commit_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="no-such-ref"):
        against_commit.checkout("no-such-ref")


def test_a_wave_counts_tokens_and_the_clients_own_cpu() -> None:
    load = GeneratorUsage(cpu=0.5, wall=2.0)
    streams = [Record(index=0, scheduled=0, output_tokens=count) for count in (2, 8)]
    streams[0].output(1.0, 1)
    streams[0].output(2.0, 1)
    streams[1].output(3.0, 4)
    both = Wave(streams, load)
    assert (both.tokens, both.events, both.client_busy) == (10, 6, 0.25)
    assert (both.ttft_ms(), both.itl_ms(50), both.itl_ms(100)) == (2000, 0, 1000)
    cell = LoadCost(both, {"cog": 0.01, "stub a": 0.02, "stub b": 0.03, "others": 0.04})
    assert cell.us == pytest.approx(10_000)
    assert cell.costs() == pytest.approx([0, 0, 1000, 0, 0, 5000])


BURN = """
import threading, time
def burn():
    until = time.thread_time() + 0.3
    while time.thread_time() < until: pass
held = bytearray(b'x') * 50_000_000
other = threading.Thread(target=burn); other.start(); other.join()
burn()
for _ in range(30): time.sleep(0.001)
print(time.process_time(), flush=True); input()
"""


def test_cpu_wake_ups_and_memory_of_a_process_are_those_that_it_used() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        used = float(child.stdout.readline())
        found = _resource_usage.uses(child.pid)["others"]
        held = _resource_usage.memory_bytes(child.pid)["others"]
        child.communicate("\n")
    assert used >= 0.6
    assert found.user + found.system == pytest.approx(used, abs=0.04)
    assert found.wake_ups >= 30
    assert 50_000_000 <= held < 80_000_000


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/x/bin/tritonserver --model-repository=m", "tritonserver"),
        ("/x/triton_python_backend_stub /r/tensorrt_llm/1/model.py shm", "stub tensorrt_llm"),
        ("python -m cog.server.http --host 127.0.0.1", "cog"),
        ("python -m cog_triton.front.server --listen PORT=3", "server"),
        ("python -c import_coglet;coglet.server._run_worker()", "worker"),
        ("python -S -I /x/reaper.py -- python -m cog.server.http", "others"),
        ("python -m cog_triton serve --engine mock", "others"),
    ],
)
def test_command_lines_are_mapped_to_parts_of_a_server(line: str, part: str) -> None:
    assert _resource_usage.part_of([*line.split(" "), ""]) == part


def test_a_soak_finds_growth_and_answers_that_were_not_counted() -> None:
    samples = [soak.Sample(at, at, {"cog": 40.0 + at * (at > 50)}) for at in range(0, 101, 5)]
    assert soak.growth(samples) == {"cog": [40.0, 132.5]}
    answer = SimpleNamespace(outcome="complete", kind=SimpleNamespace(api=None))
    assert soak.wrong([answer, answer], 2) == []  # type: ignore[list-item]
    assert len(soak.wrong([answer, answer], 1)) == 1  # type: ignore[list-item]
