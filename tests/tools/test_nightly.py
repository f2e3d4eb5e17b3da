"""scripts/nightly.py runs suites and stores their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack import REPOSITORY

SUITES = """
SUITES = {"good": "true", "bad": "echo why; exit 3", "cluster": "true", "slow": "sleep 600"}
NEEDS = {"cluster": ("KUBE_BIN", "KUBECONFIG")}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose suites are these."""
    source = (REPOSITORY / "scripts" / "nightly.py").read_text("utf-8")
    head, _, rest = source.partition("SUITES = {")
    main = rest[rest.index("def main()") :]
    script = tmp_path / "scripts" / "nightly.py"
    script.parent.mkdir()
    script.write_text(f"{head}{SUITES}\n{main}", "utf-8")
    (tmp_path / ".gitignore").write_text(".work\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    return subprocess.run(
        ["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(directory: Path) -> None:
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "--allow-empty", "-m", "x")


def run(checkout: Path, *words: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "scripts/nightly.py", *words],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def results(checkout: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkout / "nightly.json").read_text())
    return found


def test_each_suite_has_its_result_and_its_reason(checkout: Path) -> None:
    code, said = run(checkout, "good", "bad", "cluster")
    assert code == 1
    assert "nightly: good: passed" in said
    assert "nightly: bad: failed in 0 s:\n  why\n" in said
    found = results(checkout)
    assert found["commit"] == git(checkout, "rev-parse", "HEAD")
    suites = found["suites"]
    assert suites["good"] == {"result": "passed", "seconds": 0}
    assert suites["bad"] == {"result": "failed", "seconds": 0, "why": "exit status 3"}
    assert suites["cluster"]["why"] == "KUBE_BIN or KUBECONFIG is not given"
    assert suites["slow"] == {"result": "not run", "why": "not asked for"}


def test_results_of_the_same_commit_stay_and_those_of_another_go(checkout: Path) -> None:
    assert run(checkout, "good")[0] == 0
    assert run(checkout, "cluster", KUBECONFIG="x")[0] == 0
    found = {name: one["result"] for name, one in results(checkout)["suites"].items()}
    assert found == {"good": "passed", "cluster": "passed", "bad": "not run", "slow": "not run"}
    commit(checkout)
    run(checkout, "cluster")
    assert {one["result"] for one in results(checkout)["suites"].values()} == {"not run"}


def test_what_is_not_committed_is_refused_for_results_name_a_commit(checkout: Path) -> None:
    (checkout / "more.py").write_text("")
    code, said = run(checkout, "good")
    assert code == 2
    assert "?? more.py" in said


def test_ctrl_c_ends_the_suite_and_keeps_the_others(checkout: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "scripts/nightly.py", "good", "slow"],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    for line in process.stdout:
        if "slow: begun" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    assert "interrupted" in process.stdout.read()
    process.stdout.close()
    assert process.wait() == 130
    assert results(checkout)["suites"]["good"]["result"] == "passed"


@pytest.mark.parametrize(
    ("commits", "words"),
    [(1, "nightly.json is 1 commits old"), (41, "WARNING: nightly.json is 41 commits old")],
)
def test_old_results_are_warned_of(checkout: Path, commits: int, words: str) -> None:
    assert "WARNING: there is no nightly.json" in run(checkout, "--age")[1]
    run(checkout, "good")
    for _ in range(commits):
        commit(checkout)
    assert words in run(checkout, "--age")[1]
