"""The repository's Python files, each parsed once for all tests of its structure."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file, which no test may change."""
    return ast.parse(path.read_text("utf-8"))


@cache
def trees(folder: str) -> dict[str, ast.Module]:
    """The syntax trees of all files below a folder of the repository, by their paths in it."""
    base = ROOT / folder
    return {path.relative_to(base).as_posix(): tree(path) for path in sorted(base.rglob("*.py"))}
