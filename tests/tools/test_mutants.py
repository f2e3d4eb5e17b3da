"""scripts/mutants.py: which mutants tests kill, and which of its table are no longer there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from script_modules import ROOT, imported

SOURCE = '''"""A module."""


def larger(one: int, other: int) -> int:
    return one if one > other else other  # a comment


def unseen(number: int) -> int:
    return number + 1
'''
TEST = r"""import os, subprocess, sys
import toy


def test_copy():
    code = "import toy; print(toy.__file__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert shown == f"{os.getcwd()}/toy.py\n"


def test_larger():
    assert toy.larger(1, 2) == 2
"""
ROW = (
    "toy\tlarger\t5\treturn one if one > other else other\treturn one if one <= other else other"
    "\tkilled\ttest_toy.py::test_larger"
)
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported(["scripts"], ["mutations", "mutants"]) as modules:
        if subprocess.run([*modules.mutants.APART, "true"], check=False).returncode:
            pytest.skip("no namespaces here")
        yield modules


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a module, its test, and a table of one mutant."""
    for place in ("tests", ".venv"):
        (tmp_path / place).mkdir()
    (tmp_path / "toy.py").write_text(SOURCE)
    (tmp_path / "test_toy.py").write_text(TEST)
    (tmp_path / "tests" / "mutants.tsv").write_text(f"heading\n{ROW}\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


@pytest.fixture
def run(checkout: Path, scripts: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str]:
        modules = {"toy": (["toy.py"], ["test_*.py"])}
        return scripts.mutants.main(list(arguments), checkout, modules), capfd.readouterr().out

    return run


def test_recorded_mutants_are_killed_again(
    checkout: Path, run: Run, scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.mutants, "COUNT", 5)
    run("--record")
    rows = {(row.function, row.outcome, row.test) for row in scripts.mutants.table(checkout)}
    assert ("larger", "killed", "test_toy.py::test_larger") in rows
    assert ("unseen", "survived", "") in rows
    code, said = run()
    assert (code, "survived" in said, "killed" in said) == (0, False, True)
    assert (checkout / "toy.py").read_text() == SOURCE
    assert not list((checkout / ".work" / "mutants").iterdir())


@pytest.mark.parametrize(
    ("file", "before", "after", "ends"),
    [
        ("toy.py", "def larger", "# A line.\ndef larger", (0, "killed   toy.py:6: return one")),
        ("toy.py", "larger(", "greater(", (1, "its tests fail without a mutant")),
        ("toy.py", "one > other", "other < one", (0, "gone     toy:5: return one")),
        ("test_toy.py", "larger(1, 2) == 2", "larger", (1, "survived toy.py:5: return one")),
    ],
)
def test_what_a_change_does_to_a_killed_mutant(
    checkout: Path, run: Run, file: str, before: str, after: str, ends: tuple[int, str]
) -> None:
    (checkout / file).write_text((checkout / file).read_text().replace(before, after, 1))
    code, said = run("toy")
    assert (code, ends[1] in said) == (ends[0], True)


def test_only_changed_modules_are_run(checkout: Path, run: Run) -> None:
    git = ["git", "-C", str(checkout), "-c", "user.name=me", "-c", "user.email=me@localhost"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "All"], check=True)
    assert "toy" not in run("--changed", "HEAD")[1]
    (checkout / "toy.py").write_text(f"{SOURCE}\n")
    assert "killed   toy.py:5" in run("--changed", "HEAD")[1]


def test_the_table_has_15_mutants_of_each_module(scripts: SimpleNamespace) -> None:
    rows = scripts.mutants.table(ROOT)
    assert {row.module for row in rows} == set(scripts.mutants.MODULES)
    for name, (sources, tests) in scripts.mutants.MODULES.items():
        assert sum(row.module == name for row in rows) == scripts.mutants.COUNT, name
        there = [any(any(ROOT.glob(each)) for each in part) for part in (sources, tests)]
        assert there != [True, False], name  # without its source, a module's mutants are gone
