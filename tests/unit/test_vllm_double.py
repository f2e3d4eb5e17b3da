"""Double of vLLM: has the names and signatures of the real one; what we import is there."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import DOUBLES

from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.request_import import named, written

RECORD = types_of().record


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The record, while the double can be imported."""
    monkeypatch.syspath_prepend(str(DOUBLES))
    yield RECORD
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("section", ["signatures", "hooks"])
def test_signatures_match_the_record(record: Any, section: str) -> None:
    for name, parameters in record[section].items():
        assert written(named(name)) == parameters, name


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("engine_args", "vllm.engine.arg_utils:AsyncEngineArgs"),
        ("sampling_params", "vllm.sampling_params:SamplingParams"),
        ("structured_outputs", "vllm.sampling_params:StructuredOutputsParams"),
        ("repetition_detection", "vllm.sampling_params:RepetitionDetectionParams"),
        ("lora_request", "vllm.lora.request:LoRARequest"),
        ("completion_output", "vllm.outputs:CompletionOutput"),
    ],
)
def test_fields_match_the_record(record: Any, section: str, name: str) -> None:
    module, _, cls = name.partition(":")
    fields = dataclasses.fields(getattr(importlib.import_module(module), cls))
    assert {f.name for f in fields if f.name[0] != "_"} == set(record[section])


def test_exceptions_match_the_record(record: Any) -> None:
    found = {}
    for module in ("vllm.exceptions", "vllm.v1.engine.exceptions"):
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, type) and value.__module__ == module:
                found[f"{module}:{name}"] = [base.__name__ for base in value.__bases__]
    assert found.items() <= record["exceptions"].items()
    assert len(found) == 10


@pytest.mark.parametrize(
    ("version", "exact"),
    [("0.33.1+cu130", True), ("0.34.0rc1", False), ("0.3.3", False), (None, True)],
)
def test_the_record_is_exact_for_its_minor_version(version: str | None, exact: bool) -> None:
    types = types_of(version)
    assert types.record is RECORD
    assert types.version == (version or RECORD["source"]["version"])
    assert types.exact is exact


PACKAGE = Path(__file__).parents[2] / "cog_triton"


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


@pytest.mark.upstream
@pytest.mark.skipif("PYTEST_VLLM" not in os.environ, reason="needs vLLM's sources")
@pytest.mark.parametrize(("module", "name"), USED)
def test_vllm_has_what_the_package_imports(module: str, name: str) -> None:
    place = Path(os.environ["PYTEST_VLLM"]).joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    assert file.is_file()
    below = name and ((place / f"{name}.py").exists() or (place / name).is_dir())
    assert not name or below or name in set(bound(ast.parse(file.read_text("utf-8"))))
