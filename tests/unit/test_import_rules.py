"""Imports: rooms import those below them, and a process what it needs."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from python_sources import trees

import cog_triton
from cog_triton.engines.model_config_proto import model_config_pb2
from cog_triton.engines.registry import FAMILIES
from cog_triton.triton import model_repository

ROOT = Path(cog_triton.__file__).parents[1]
FLOORS = (
    ("errors",),
    ("removed",),
    ("settings",),
    ("system",),
    ("ipc",),
    ("text", "artifact", "pictures"),
    ("download", "build_scripts"),
    ("oci",),
    ("sources",),
    ("sizing",),
    ("engines",),
    ("processes",),
    ("inspection", "backend", "triton", "packages"),
    ("serving", "builder", "bench"),
    ("front", "models", "doctor"),
    ("serve",),
    ("cli", "door"),
    ("__main__",),
)
"""Rooms from the ground up; rooms of one floor do not import each other."""


STRUCTURE = runpy.run_path(str(ROOT / "scripts" / "structure"))
MODULES = STRUCTURE["modules"](ROOT)


def test_imports_point_down() -> None:
    drawn = STRUCTURE["arrows"](MODULES)
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert [why for (source, target), why in drawn.items() if floor[source] <= floor[target]] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Within functions and for annotations neither."""
    drawn = {
        (module, target)
        for module, path in MODULES.items()
        for target in STRUCTURE["imports"](path.read_text("utf-8"), MODULES)
    }
    assert STRUCTURE["in_circles"](drawn) == []


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


CLIENTS = ("httpx", "requests", "grpc", "huggingface_hub")
PROCESSES = {
    "engine process": (
        ("cog_triton.backend.engine_process", "cog_triton.engines.mock.engine"),
        ("pydantic", "pydantic_settings", "yaml", "cog_triton.settings", *CLIENTS),
    ),
    "program of images": (("cog_triton.serve",), (*CLIENTS, "numpy", "tokenizers")),
    "Cog worker": (
        ("cog_triton.serving.coglet.predictor",),
        ("cog_triton.settings", "starlette", "httpx", "grpc", "numpy", "tokenizers"),
    ),
    "command line": (
        ("cog_triton.cli.serve", "cog_triton.cli.server_run", "cog_triton.models.preparation"),
        (*CLIENTS, "numpy", "tokenizers"),
    ),
}


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_no_package_that_it_has_no_use_for(process: str) -> None:
    modules, needless = PROCESSES[process]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {', '.join(modules)}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {*needless} & {*done.stdout.split()}


BARE = """
import importlib.util, sys, types
sys.path.append(sys.argv[1])
assert importlib.util.find_spec("tokenizers") is None
provided = types.ModuleType("triton_python_backend_utils")
provided.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
sys.modules[provided.__name__] = provided
for text in sys.argv[2:]:
    exec(text, {})
print(*sys.modules)
"""


def test_a_stub_imports_the_standard_library_and_numpy_alone(tmp_path: Path) -> None:
    """In a Python that has nothing else, as that of a tritonserver that is not the wheel's."""
    models = [path.read_text("utf-8") for path in (ROOT / "triton_model_repo").rglob("model.py")]
    for module in ("step_model", "adapter_loader"):
        models.append(model_repository._MODEL_PY.format(module=module))
    for family in FAMILIES:
        opened = object.__new__(family)
        opened.directory = tmp_path
        if family.engine_class:
            models.append(opened.render_python(model_config_pb2.ModelConfig(), 1, {}))
            models.append(f"import {family.request_decoder.partition(':')[0]}")
    assert len(models) == 4 + 2 + 2 * 3
    (tmp_path / "cog_triton").symlink_to(ROOT / "cog_triton")
    (tmp_path / "numpy").symlink_to(Path(numpy.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE, tmp_path, *models],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
