"""Hooks: what we use of vLLM, Triton and Cog that they have not published, and checks of each."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HELD, BROKE, NOT_DONE = "holds", "BROKE", "NOT DONE"
_VLLM = "cog_triton/engines/vllm"
_USERS = {
    "cog": ["cog_triton/serving/coglet/*.py"],
    "triton": ["cog_triton/triton/infer_stream.py", "cog_triton/triton/launch.py",
               "cog_triton/front/triton_schema.py", "cog_triton/front/triton_gate.py",
               "cog_triton/backend/triton_engine.py"],
    "vllm": [f"{_VLLM}/engine_*.py", f"{_VLLM}/*_arguments.py", f"{_VLLM}/model_directory.py"],
}  # fmt: skip
"""By what is bumped: modules that rely on how it works inside."""


class Row(NamedTuple):
    """A row of the report."""

    name: str
    file: str
    outcome: str
    advice: str


class Hook(NamedTuple):
    """A module that relies on internals: its tests, and what its docstring says to do."""

    name: str
    file: str
    tests: Sequence[str]
    advice: str


def hooks_of(option: str, root: Path) -> Iterator[Hook]:
    """The modules that rely on internals of what an option bumps."""
    tests = {path: path.read_text("utf-8") for path in sorted(root.glob("tests/unit/test_*.py"))}
    for pattern in _USERS[option]:
        for path in sorted(root.glob(pattern)):
            about = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            if path.name == "__init__.py":
                continue
            dotted = ".".join(path.relative_to(root).with_suffix("").parts)
            package, _, stem = dotted.rpartition(".")
            imported = re.compile(rf"{re.escape(package)}(\.{stem}\b| import .*\b{stem}\b)")
            until = re.search(r"[Dd]elete when[^.]*\.", about)
            advice = (
                " ".join(until[0].split()) if until else "its docstring says on what it relies."
            )
            used = [
                str(one.relative_to(root)) for one, text in tests.items() if imported.search(text)
            ]
            yield Hook(about.partition("\n")[0], str(path.relative_to(root)), used, advice)


def vllm_hooks(site: Path, root: Path) -> list[Row]:
    """What we import of vLLM, and what its output handler must call, in a version's sources."""
    rows = []
    for path in sorted((root / "cog_triton").rglob("*.py")):
        missing = [
            f"line {line}: {module}.{name}" if name else f"line {line}: {module}"
            for line, module, name in _imports(path, "vllm")
            if not _defines(site, module, name)
        ]
        if any(_imports(path, "vllm")):
            advice = f"gone: {', '.join(missing)}" if missing else ""
            file = str(path.relative_to(root))
            rows.append(Row("names of vLLM", file, BROKE if missing else HELD, advice))
    rows.append(_step_outputs(site, root))
    return rows


def _imports(path: Path, package: str) -> Iterator[tuple[int, str, str]]:
    """Lines, modules and names of a file's imports from a package."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.split(".")[0] == package:
                yield from ((node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    yield node.lineno, alias.name, ""


def _defines(site: Path, module: str, name: str) -> bool:
    """Whether a module is there, and binds a name at its top, or lazily by a table of strings."""
    place = site.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return False
    if not name or (place / f"{name}.py").exists() or (place / name).is_dir():
        return True
    tree = ast.parse(file.read_text("utf-8"))
    lazy = any(isinstance(one, ast.FunctionDef) and one.name == "__getattr__" for one in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound = {node.name}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            bound = {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = {node.id}
        elif lazy and isinstance(node, ast.Constant):
            bound = {node.value} if isinstance(node.value, str) else set()
        else:
            continue
        if name in bound:
            return True
    return False


_OUTPUTS = "vllm/v1/engine/output_processor.py"


def _step_outputs(site: Path, root: Path) -> Row:
    """The start-up check of `StepOutputs`, on a version's code, without what it imports."""
    file = f"{_VLLM}/engine_api.py"
    name = "StepOutputs: vLLM's output handler calls what we replace"
    sys.path.insert(0, str(root))
    try:
        api = importlib.import_module("cog_triton.engines.vllm.engine_api")
        engine = _bare_class(site / "vllm/v1/engine/async_llm.py", "AsyncLLM")
        processor = _bare_class(site / _OUTPUTS, "OutputProcessor")
        outputs = types.ModuleType("vllm.v1.engine.output_processor")
        outputs.RequestOutputCollector = _bare_class(  # type: ignore[attr-defined]
            site / _OUTPUTS, "RequestOutputCollector"
        )
        made = engine.__new__(engine)
        made.output_processor = processor.__new__(processor)
        parents = ("vllm", "vllm.v1", "vllm.v1.engine")
        modules = {one: types.ModuleType(one) for one in parents} | {outputs.__name__: outputs}
        before = {one: sys.modules.get(one) for one in modules}
        sys.modules.update(modules)
        try:
            missing = list(api._missing(made))
        finally:
            for one, module in before.items():
                if module is None:
                    del sys.modules[one]
                else:
                    sys.modules[one] = module
    except (OSError, SyntaxError, LookupError, AttributeError, TypeError, ValueError) as error:
        missing = [f"{type(error).__name__}: {error}"]
    finally:
        sys.path.remove(str(root))
    if missing:
        return Row(name, file, BROKE, f"{'; '.join(missing)}; `_missing` and `StepOutputs` there")
    return Row(name, file, HELD, "")


def _bare_class(path: Path, name: str) -> Any:
    """A class with the code and parameters of its methods, without bases, types and defaults."""
    found = [one for one in ast.parse(path.read_text("utf-8")).body
             if isinstance(one, ast.ClassDef) and one.name == name]  # fmt: skip
    if not found:
        raise LookupError(f"{path.name} has no class {name}")
    (node,) = found
    kept: list[ast.stmt] = []
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name != "__del__":
            one.decorator_list, one.returns = [], None
            given = one.args
            for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                argument.annotation = None
            for argument in filter(None, (given.vararg, given.kwarg)):
                argument.annotation = None
            given.defaults = [ast.Constant(None) for _ in given.defaults]
            given.kw_defaults = [value and ast.Constant(None) for value in given.kw_defaults]
            kept.append(one)
        elif isinstance(one, ast.Assign) and "__slots__" in ast.unparse(one.targets[0]):
            kept.append(one)
    bare = ast.ClassDef(name, [], [], kept or [ast.Pass()], [])
    if "type_params" in ast.ClassDef._fields:
        bare.type_params = []  # type: ignore[attr-defined]
    tree = ast.fix_missing_locations(ast.Module([bare], []))
    space: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), space)
    return space[name]


def interface_changes(old: str, new: str) -> list[str]:
    """What differs between two records of vLLM's interface, as a list in Markdown."""
    before, after = json.loads(old), json.loads(new)
    found = []
    for section in sorted({*before, *after} - {"source"}):
        was, now = before.get(section, {}), after.get(section, {})
        if not isinstance(was, dict) or not isinstance(now, dict):
            if was != now:
                found.append(f"- {section}: changed")
            continue
        for title, names in (("gone", was.keys() - now.keys()), ("new", now.keys() - was.keys())):
            if names:
                found.append(f"- {section}, {title}: {', '.join(sorted(names))}")
        found += [
            f"- {section}, {name}: {_shown(was[name])} is now {_shown(now[name])}"
            for name in sorted(was.keys() & now.keys())
            if was[name] != now[name]
        ]
    return found


def _shown(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"`{text[:160]}`"
