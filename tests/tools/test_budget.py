"""scripts/budget.py counts lines, and lets no number rise."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from script_modules import imported

with imported(["scripts"], ["budget"]) as _found:
    budget = _found.budget
SOURCE = '''"""Says what.

More.
"""

import os
from a import (
    b,
    c,
)

X = """text
that is code"""  # a comment


def f() -> int:
    """Return 1."""
    # a comment
    return (
        1
    )
'''


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository; no name is without `-`, for tests."""
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    for name, text in {
        "cog_triton/front/a-.py": SOURCE,
        "tests/test_a.py": "x = 1\n",
        "tests/data.json": "{}\n",
        "docs/a.md": "text\n",
        "pyproject.toml": "[tool.ruff]\nline-length = 100\n",
        "budget.txt": "cog_triton 0 0 0 0\ncog_triton/front 6 21 400 0\ntests 1 1 9 1\n"
        "docs - - - -\n. - - - -\nnoqa 0\n",
    }.items():
        write(tmp_path / name, text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def git(directory: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    subprocess.run(["git", *identity, *words], cwd=directory, check=True)


def commit(directory: Path) -> None:
    git(directory, "add", "-A")
    git(directory, "commit", "--allow-empty", "-qm", "x")


def run(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["budget.py", *words])
    code = budget.main()
    return code, capsys.readouterr().out


def test_comments_docstrings_and_imports_are_no_code_lines(
    checkout: Path, monkeypatch: Any, capsys: Any
) -> None:
    assert run(monkeypatch, capsys) == (0, "budget: cog_triton has 21 lines, 6 of code\n")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("cog_triton/front/b-.py", "x = 1\n", "cog_triton/front: 7 code lines, and at most 6"),
        ("cog_triton/new/b-.py", "x = 1\n", "cog_triton: 1 code lines, and at most 0"),
        ("new/b.txt", "x\n", "cog_triton: 1 other lines, and at most 0"),
        ("tests/test_a.py", "x = 1  # noqa\n", "1 comments silence a check, and at most 0"),
        (
            "pyproject.toml",
            "[tool.ruff]\nline-length = 120\n",
            "line-length = 120, and it stays 100",
        ),
        ("docs/long.py", "x = 1\n" * 901, "docs/long.py has 901 lines, and at most 900"),
    ],
)
def test_a_number_that_rises_is_reported(
    checkout: Path, monkeypatch: Any, capsys: Any, name: str, text: str, words: str
) -> None:
    write(checkout / name, text)
    git(checkout, "add", "-A")
    code, said = run(monkeypatch, capsys)
    assert code == 1
    assert words in said


def test_an_allowance_is_for_package_and_tests(
    checkout: Path, monkeypatch: Any, capsys: Any
) -> None:
    table = checkout / "budget.txt"
    table.write_text(table.read_text() + "allowance Real clients 2\n")
    commit(checkout)
    write(checkout / "cog_triton/new/b-.py", "x = 1\n")
    write(checkout / "tests/b-.py", "y = 2\n")
    git(checkout, "add", "-A")
    assert run(monkeypatch, capsys)[0] == 0
    write(checkout / "cog_triton/front/b-.py", "x = 1\n")
    git(checkout, "add", "-A")
    assert "tests: 2 code lines" in run(monkeypatch, capsys)[1]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tests 1 1 9 1", "tests 1 1 9 2", "tests: other lines raised from 1 to 2"),
        ("docs - - - -", "docs - - - -\nnew 0 0 9 1", "new: bytes raised from 0 to 9"),
        ("21 400 0", "21 401 0", "cog_triton, tests: bytes raised by 1, 0 are"),
        ("noqa 0", "noqa 1", "noqa raised from 0 to 1"),
        ("noqa 0", "noqa 0\nallowance Real clients 601", "601 lines, and at most 600 are due"),
    ],
)
def test_a_table_that_is_raised_is_seen_in_its_history(
    checkout: Path, monkeypatch: Any, capsys: Any, old: str, new: str, words: str
) -> None:
    table = checkout / "budget.txt"
    before = table.read_text()
    table.write_text(before.replace(old, new))
    for _ in range(2):  # in the working tree, then as a commit with another after it
        code, said = run(monkeypatch, capsys)
        assert code == 1
        assert words in said
        commit(checkout)


def test_numbers_that_fell_are_written(checkout: Path, monkeypatch: Any, capsys: Any) -> None:
    write(checkout / "tests/data.json", "")
    write(checkout / "cog_triton/front/b-.py", "x = 1\n")
    git(checkout, "add", "-A")
    assert run(monkeypatch, capsys, "--lower")[0] == 0
    rows = budget.Table.parse((checkout / "budget.txt").read_text()).rows
    assert rows["tests"] == [1, 1, 6, 0]
    assert rows["cog_triton/front"][:2] == [6, 21], "what rose stays"
