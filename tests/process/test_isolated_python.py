"""Isolated Python: stubs and build steps see this package and nothing else of ours."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path

import pytest

import cog_triton
from cog_triton.builder.config import parse_config
from cog_triton.builder.plan import Families, make_plan
from cog_triton.builder.step import run_step

CONFIG = "{model_id: m, example_name: family, build: {script: build.py, output_dir: engine}}"
SEEN = """
import huggingface_hub, importlib.util, json, numpy, sys, cog_triton.errors
seen = [sys.prefix, huggingface_hub.__version__, numpy.__version__, cog_triton.__version__]
print(json.dumps([*seen, importlib.util.find_spec("httpx") is None]))
"""


def python_environment(directory: Path, **packages: str) -> Path:
    """A virtual environment with packages of one line; its bin directory."""
    venv.create(directory, symlinks=True, with_pip=False)
    (site,) = directory.glob("lib/python*/site-packages")
    for name, line in packages.items():
        (site / f"{name}.py").write_text(line)
    return directory / "bin"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment of NVIDIA's container."""
    version = "__version__ = 'ngc'"
    directory = tmp_path_factory.mktemp("theirs") / "ngc"
    return python_environment(directory, huggingface_hub=version, numpy=version)


def test_a_server_with_its_own_python_sees_nothing_of_ours(theirs: Path, tmp_path: Path) -> None:
    version = "__version__ = 'ours'"
    ours = python_environment(tmp_path / "ours", huggingface_hub=version, numpy=version, httpx="")
    (site,) = (tmp_path / "ours").glob("lib/python*/site-packages")
    (site / "repository.pth").write_text(str(Path(cog_triton.__file__).parents[1]))
    # As a stub does, it takes its Python from the first python3 in PATH.
    server = tmp_path / "opt" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.write_text(f"#!/bin/sh\nexec python3 -c '{SEEN}'")
    server.chmod(0o755)
    start = f"""
import subprocess
from pathlib import Path
from cog_triton.triton import installation
import huggingface_hub, numpy
assert huggingface_hub.__version__ == numpy.__version__ == "ours"
found = installation.find_installation(Path("{tmp_path}/work"), Path("{server}"))
subprocess.run([found.binary], env=found.environment, check=True)
"""
    done = subprocess.run(
        [ours / "python", "-c", start],
        env={
            "PATH": f"{ours}:{theirs}:/usr/bin:/bin",
            "VIRTUAL_ENV": str(ours.parent),
            "PYTHONPATH": f"{site}:{tmp_path}/mounted",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen == [str(theirs.parent), "ngc", "ngc", cog_triton.__version__, True]


def test_a_build_step_with_its_own_python_sees_nothing_of_ours(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "examples" / "family" / "build.py"
    script.parent.mkdir(parents=True)
    script.write_text(f"import os\nos.mkdir('engine'); open('engine/x', 'w').close()\n{SEEN}")
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(theirs / "python"))
    work = tmp_path / "work"
    work.mkdir()
    (step,) = make_plan(parse_config(CONFIG, "test"), Families(tensorrt_llm=tmp_path)).steps
    said: list[str] = []
    run_step(step, work, work / "log", said.append)
    seen = json.loads(said[0].removeprefix("[build] "))
    assert seen == [str(theirs.parent), "ngc", "ngc", cog_triton.__version__, True]
