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


def python_environment(directory: Path, **packages: str) -> Path:
    """A virtual environment with packages of one line; its bin directory."""
    venv.create(directory, symlinks=True, with_pip=False)
    (site,) = directory.glob("lib/python*/site-packages")
    for name, line in packages.items():
        (site / f"{name}.py").write_text(line)
    return directory / "bin"


def test_a_server_with_its_own_python_sees_nothing_of_ours(tmp_path: Path) -> None:
    ours = python_environment(
        tmp_path / "ours",
        huggingface_hub="__version__ = 'ours'",
        numpy="__version__ = 'ours'",
        httpx="",
    )
    theirs = python_environment(
        tmp_path / "ngc", huggingface_hub="__version__ = 'ngc'", numpy="__version__ = 'ngc'"
    )
    (site,) = (tmp_path / "ours").glob("lib/python*/site-packages")
    (site / "repository.pth").write_text(str(Path(cog_triton.__file__).parents[1]))
    # What a stub does: it takes its Python from the first python3 in PATH.
    models = """
import huggingface_hub, importlib.util, json, numpy, sys, cog_triton.errors
seen = [sys.prefix, huggingface_hub.__version__, numpy.__version__, cog_triton.__version__]
print(json.dumps([*seen, importlib.util.find_spec("httpx") is None]))
"""
    server = tmp_path / "opt" / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    server.write_text(f"#!/bin/sh\nexec python3 -c '{models}'")
    server.chmod(0o755)
    start = f"""
import json, subprocess, sys
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
    prefix, hub, numbers, version, no_httpx = json.loads(done.stdout)
    assert (prefix, hub, numbers, no_httpx) == (str(tmp_path / "ngc"), "ngc", "ngc", True)
    assert version == cog_triton.__version__


def test_a_step_with_its_own_python_sees_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = python_environment(
        tmp_path / "ngc", huggingface_hub="__version__ = 'ngc'", numpy="__version__ = 'ngc'"
    )
    script = tmp_path / "examples" / "family" / "build.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "import huggingface_hub, importlib.util, numpy, os, sys, cog_triton.errors\n"
        "os.mkdir('engine'); open('engine/x', 'w').close()\n"
        "print(sys.prefix, huggingface_hub.__version__, numpy.__version__)\n"
        "print([name for name in ('httpx', 'pydantic') if importlib.util.find_spec(name)])\n"
    )
    config = "{model_id: m, example_name: family, build: {script: build.py, output_dir: engine}}"
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(theirs / "python"))
    work = tmp_path / "work"
    work.mkdir()
    families = Families(tensorrt_llm=tmp_path)
    (step,) = make_plan(parse_config(config, "test"), families).steps
    said: list[str] = []
    run_step(step, work, work / "log", said.append)
    assert said[:2] == [f"[build] {tmp_path / 'ngc'} ngc ngc", "[build] []"]
