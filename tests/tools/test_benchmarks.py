"""Smoke test of every benchmark on the real servers; measuring is for `make bench`.

Servers that do not differ are one: each script runs in this process, and gets a server that is
there already where it would start another one like it. `start_up` starts its own.
"""

import argparse
import inspect
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import _servers
import against_commit
import pytest
from _servers import Server
from stack import REPOSITORY

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


def test_without_a_commit_it_is_the_last_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(against_commit, "ROOT", tmp_path)
    versions = "## 1.2.0 - 2026-01-02\n## 1.1.0 - x\n"
    (tmp_path / "CHANGELOG.md").write_text(f"## Unreleased\n\n- A change.\n\n{versions}")

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    git("init", "-q")
    with pytest.raises(SystemExit) as ended:
        against_commit.last_release()
    assert ended.value.code == 0
    assert "1.2.0, the last release, is not in this clone" in capsys.readouterr().err
    commits = []
    for subject in ("Cut 1.1.0", "Cut 1.2.0", "Go on"):
        git("commit", "-q", "--allow-empty", "-m", subject)
        commits.append(git("rev-parse", "HEAD"))
    assert against_commit.last_release() == commits[1]
    git("tag", "v1.2.0", commits[2])
    assert against_commit.last_release() == commits[2]
    (tmp_path / "CHANGELOG.md").write_text(f"## Unreleased\n\n{versions}")  # this tree is 1.2.0
    assert against_commit.last_release() == commits[0]


def test_a_commit_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="no-such-ref"):
        against_commit.checkout("no-such-ref")
