"""What we import of vLLM is in a version's sources: PYTEST_VLLM=DIR pytest -m upstream."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cog_triton"
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif("PYTEST_VLLM" not in os.environ, reason="needs vLLM's sources"),
]


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Modules of vLLM that a file imports, and names from them."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from ((name, "") for name in names if name.split(".")[0] == "vllm")


def bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module binds, or gives lazily by a table of strings."""
    lazy = any(isinstance(one, ast.FunctionDef) and one.name == "__getattr__" for one in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif lazy and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


USED = sorted({one for path in PACKAGE.rglob("*.py") for one in imports(path)})


@pytest.mark.parametrize(("module", "name"), USED)
def test_vllm_has_what_the_package_imports(module: str, name: str) -> None:
    place = Path(os.environ["PYTEST_VLLM"]).joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    assert file.is_file()
    below = name and ((place / f"{name}.py").exists() or (place / name).is_dir())
    assert not name or below or name in set(bound(ast.parse(file.read_text("utf-8"))))
