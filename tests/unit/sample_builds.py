"""Builds of a family of two small scripts: what their tests plan and run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.builder.plan import Families, Script, Step, make_plan
from cog_triton.builder.run import run_build
from cog_triton.builder.script_build import ScriptBuild
from cog_triton.builder.script_options import MODEL
from cog_triton.builder.workspace import Workspace

CONVERT = """
import pathlib, sys
pathlib.Path("../../../runs").open("a").write("convert ")
out = pathlib.Path("ckpt"); out.mkdir()
(out / "w").write_text(pathlib.Path(MODEL, "model.gguf").read_text() + " ".join(sys.argv[1:]))
"""
BUILD = """
import json, pathlib
pathlib.Path("../../../runs").open("a").write("build ")
out = pathlib.Path("engine"); out.mkdir()
(out / "rank0.engine").write_text(pathlib.Path("ckpt/w").read_text())
limits = {"max_input_len": 3, "max_seq_len": 4, "max_batch_size": 2}
model = {"architecture": "LlamaForCausalLM", "dtype": "float16"}
config = {"version": "1.2.1", "pretrained_config": model, "build_config": limits}
(out / "config.json").write_text(json.dumps(config))
"""
# Starts a grandchild that shrugs off SIGTERM, says both pids, and never ends.
STUBBORN = """
import pathlib, signal, subprocess, sys, time, os
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path("pids.tmp").write_text(f"{os.getpid()} {child.pid}")
os.rename("pids.tmp", "pids")
time.sleep(600)
"""


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Directory of the family ``fake``, of the scripts above."""
    family = tmp_path / "examples" / "fake"
    family.mkdir(parents=True)
    (family / "convert.py").write_text(CONVERT.replace("MODEL", repr(MODEL)))
    (family / "build.py").write_text(BUILD)
    (family / "stubborn.py").write_text(STUBBORN)
    return family.parent


def config_of(tmp_path: Path, **changes: object) -> BuildConfig:
    """Config of its two steps over a model in `tmp_path`; a key set to None is left out."""
    model = tmp_path / "source"
    model.mkdir(exist_ok=True)
    if not (model / "model.gguf").exists():
        (model / "model.gguf").write_text("weights ")
    value = {
        "model_id": str(model),
        "example_name": "fake",
        "convert": {"script": "convert.py", "output_dir": "ckpt", "args": {"dtype": "f16"}},
        "build": {"script": "build.py", "output_dir": "engine"},
        **changes,
    }
    value = {key: item for key, item in value.items() if item is not None}
    return parse_config(yaml.safe_dump(value, sort_keys=False), "test")


def step_of(tmp_path: Path, text: str) -> Step:
    """Step of one script of this text, which is to write into ``out``."""
    script = tmp_path / "script.py"
    script.write_text(text)
    return Step(
        name="build",
        script=Script("fake/script.py", (sys.executable, str(script)), script, sys.executable),
        args={},
        input="in",
        output_dir="out",
        env={},
    )


def build_engine(
    config: BuildConfig,
    workspace: Workspace,
    output: Path,
    examples: Path,
    echo: Callable[[str], None] = print,
) -> Path:
    """Plan and run the build of `config`, whose scripts are in `examples`."""
    plan = make_plan(config, Families(examples))
    return run_build(ScriptBuild(plan, workspace, echo), output)


def outputs(workspace: Workspace) -> list[Path]:
    """The directories of finished stages, the oldest first."""
    found = [path for path in (workspace.root / "steps").iterdir() if not path.suffix]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)
