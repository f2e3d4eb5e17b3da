"""Import rules of the package: every room imports only rooms below it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import cog_triton

ROOT = Path(cog_triton.__file__).parents[1]
FLOORS = (
    ("errors", "environment_types"),
    ("settings",),
    ("system",),
    ("ipc",),
    ("text", "artifact", "pictures"),
    ("download", "build_scripts", "keeper"),
    ("engines", "sizing", "oci"),
    ("inspection", "backend", "triton", "packages"),
    ("serving", "builder", "bench"),
    ("door", "models", "doctor"),
    ("cli",),
    ("__main__",),
)
"""Rooms from the ground up; rooms of one floor do not import each other."""


def test_imports_point_down() -> None:
    structure = runpy.run_path(str(ROOT / "scripts" / "structure"))
    drawn = structure["arrows"](structure["modules"](ROOT))
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert [why for (source, target), why in drawn.items() if floor[source] <= floor[target]] == []


def test_nothing_imports_the_package_as_a_whole_or_relatively() -> None:
    for path in ROOT.glob("cog_triton*/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


def test_the_command_line_alone_imports_the_pruning_package() -> None:
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cog_triton").rglob("*.py")
        if "cog_triton_prune" in path.read_text("utf-8")
    }
    assert importing == {"cog_triton/cli/app.py"}
