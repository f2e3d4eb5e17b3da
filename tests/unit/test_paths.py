"""Data directories: found in a checkout, a wheel and an image, never a stranger's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cog_triton.system import paths

ROOT = Path(__file__).parents[2]
PROJECTS = ["runner", "builder", "mock_cog_triton"]
DATA = [*PROJECTS, "triton_model_repo"]
LOCKS = [f"requirements/{name}.lock" for name in ("python", "vllm")]
FIND = """
import json
from cog_triton.errors import CogTritonError
from cog_triton.system import paths

found = {}
for name in ("runner", "builder", "mock_cog_triton", "triton_model_repo"):
    try:
        path = paths.cog_project(name) if name != "triton_model_repo" else paths.triton_model_repo()
        found[name] = str(path)
    except CogTritonError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def test_home_of_no_one_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.expanded("~/x") == Path("/home/me/x")
    assert paths.expanded("~no-such-user/x") == Path("~no-such-user/x")


def found_from(directory: Path) -> dict[str, str]:
    """What a package installed in `directory` finds, or its error."""
    done = subprocess.run(
        [sys.executable, "-c", FIND],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def install_package(directory: Path) -> Path:
    """What finding needs of the package, and its own ``builder``, as in site-packages."""
    for name in ("__init__.py", "errors.py", "system/__init__.py", "system/paths.py"):
        target = directory / "cog_triton" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "cog_triton" / name, target)
    shutil.copytree(ROOT / "cog_triton" / "builder", directory / "cog_triton" / "builder")
    return directory


def add_strangers(directory: Path) -> None:
    """Someone else's package ``runner``, Cog project ``builder`` and Triton models."""
    (directory / "runner").mkdir()
    (directory / "runner" / "__init__.py").touch()
    (directory / "builder").mkdir()
    (directory / "builder" / "cog.yaml").write_text('predict: "predict.py:Predictor"\n')
    (directory / "builder" / "predict.py").write_text("from theirs import Predictor\n")
    (directory / "triton_model_repo" / "theirs").mkdir(parents=True)
    (directory / "triton_model_repo" / "theirs" / "config.pbtxt").touch()


def packaged(site: Path) -> dict[str, str]:
    return {name: str(site / "cog_triton" / "_data" / name) for name in DATA}


def test_a_checkout_has_them_beside_the_package() -> None:
    assert [paths.cog_project(name) for name in PROJECTS] == [ROOT / name for name in PROJECTS]
    assert paths.triton_model_repo() == ROOT / "triton_model_repo"


def test_a_wheel_has_them_inside(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("cog_triton", "cog_triton_prune", *DATA):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "requirements").mkdir()
    for name in LOCKS:
        shutil.copy(ROOT / name, copy / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    add_strangers(site)
    assert found_from(site) == packaged(site)
    for name in LOCKS:
        carried = site / "cog_triton" / "_data" / name
        assert carried.read_bytes() == (ROOT / name).read_bytes()


def test_an_installation_without_them_is_refused_by_name(tmp_path: Path) -> None:
    site = install_package(tmp_path / "site-packages")
    add_strangers(site)
    for name, error in found_from(site).items():
        assert error.startswith("E2106 TritonStartFailed: ")
        assert f"{site}/cog_triton/_data/{name}" in error
