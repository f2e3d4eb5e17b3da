"""Imports: rooms import those below them, and a process what it needs."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from python_sources import trees

import cog_triton

ROOT = Path(cog_triton.__file__).parents[1]
FLOORS = (
    ("errors",),
    ("removed",),
    ("settings",),
    ("system",),
    ("ipc",),
    ("text", "artifact", "pictures"),
    ("download", "build_scripts"),
    ("engines", "sizing", "oci"),
    ("processes",),
    ("inspection", "backend", "triton", "packages"),
    ("serving", "builder", "bench"),
    ("front", "models", "doctor"),
    ("serve",),
    ("cli", "door"),
    ("__main__",),
)
"""Rooms from the ground up; rooms of one floor do not import each other."""


def test_imports_point_down() -> None:
    structure = runpy.run_path(str(ROOT / "scripts" / "structure"))
    drawn = structure["arrows"](structure["modules"](ROOT))
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert [why for (source, target), why in drawn.items() if floor[source] <= floor[target]] == []


def test_nothing_imports_the_package_as_a_whole_or_relatively() -> None:
    for path, parsed in [*trees("cog_triton").items(), *trees("cog_triton_prune").items()]:
        for node in ast.walk(parsed):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


def test_the_command_line_alone_imports_the_pruning_package() -> None:
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cog_triton").rglob("*.py")
        if "cog_triton_prune" in path.read_text("utf-8")
    }
    assert importing == {"cog_triton/cli/app.py"}


STUBS = (
    "backend.text_processing",
    "backend.bls",
    "backend.token_model",
    "backend.step_model",
    "backend.adapter_loader",
    "backend.vllm_text_model",
)
ENGINES = ("backend.engine_process", "engines.mock.engine")
SETTINGS = ("pydantic", "pydantic_settings", "yaml", "cog_triton.settings", "asyncio")
CLIENTS = ("httpx", "requests", "grpc", "huggingface_hub")
PROCESSES = {
    "stub": (STUBS, (*SETTINGS, *CLIENTS)),
    "engine process": (ENGINES, (*SETTINGS, *CLIENTS)),
    "program of images": (("serve",), (*CLIENTS, "numpy", "tokenizers")),
    "Cog worker": (
        ("serving.coglet.predictor",),
        ("cog_triton.settings", "starlette", "httpx", "grpc", "numpy", "tokenizers"),
    ),
    "command line": (
        ("cli.serve", "cli.server_run", "models.preparation"),
        (*CLIENTS, "numpy", "tokenizers"),
    ),
}
SCRIPT = """
import importlib, sys, types
# In a stub, Triton provides it.
provided = types.ModuleType("triton_python_backend_utils")
provided.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
sys.modules[provided.__name__] = provided
for name in sys.argv[1].split():
    importlib.import_module(f"cog_triton.{name}")
print(*sys.modules)
"""


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_no_package_that_it_has_no_use_for(process: str) -> None:
    modules, needless = PROCESSES[process]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, " ".join(modules)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {*needless} & {*done.stdout.split()}
