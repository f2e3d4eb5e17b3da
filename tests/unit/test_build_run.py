"""Builds from config to engine.tar: steps that are skipped, their environment, what they leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pydantic import SecretStr
from sample_builds import BUILD, build_engine, config_of, outputs
from sample_builds import examples as examples  # a fixture

import cog_triton
from cog_triton.artifact.engine_tar import unpack
from cog_triton.builder.config import parse_config
from cog_triton.builder.plan import Families, make_plan
from cog_triton.builder.script_build import ScriptBuild
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import BuildConfigInvalid, DiskFull, InvalidArgument


def test_build_runs_every_step_and_packs_the_engine(tmp_path: Path, examples: Path) -> None:
    lines: list[str] = []
    config, output = config_of(tmp_path), tmp_path / "deep" / "engine.tar"
    workspace = Workspace(tmp_path / "work")
    made = build_engine(config, workspace, output, examples, lines.append)
    assert made == output
    assert lines[0] == f"[package] {output.parent} is not there, and will be made"
    manifest = unpack(output, tmp_path / "unpacked")
    assert (tmp_path / "unpacked/rank0.engine").read_text() == "weights --dtype f16"
    assert manifest is not None
    assert manifest.engine == "tensorrt_llm"
    assert manifest.max_seq_len == 4
    assert manifest.versions["cog_triton"] == cog_triton.__version__
    assert manifest.versions["tensorrt_llm"] == "1.2.1"
    written = (tmp_path / "unpacked" / "build_config.yaml").read_text()
    assert parse_config(written, "packed") == config
    assert not [path for path in workspace.root.rglob("*") if path.is_symlink()]


def test_finished_steps_are_skipped(tmp_path: Path, examples: Path) -> None:
    workspace, runs = Workspace(tmp_path / "work"), tmp_path / "runs"

    def ran(*, cache: bool = True, **changes: object) -> str:
        """The names of the steps that a build ran."""
        runs.unlink(missing_ok=True)
        config, output = config_of(tmp_path, **changes), tmp_path / "engine.tar"
        build_engine(config, Workspace(workspace.root, cache=cache), output, examples)
        return runs.read_text() if runs.exists() else ""

    assert ran() == "convert build "
    first = (tmp_path / "engine.tar").read_bytes()
    inode = (tmp_path / "engine.tar").stat().st_ino
    assert ran() == ""
    assert (tmp_path / "engine.tar").stat().st_ino == inode
    assert ran(cache=False) == "convert build "
    assert (tmp_path / "engine.tar").read_bytes() == first
    assert ran(timeout=1000) == ""
    # An engine.tar that someone touched is packed again.
    (tmp_path / "engine.tar").write_text("damaged")
    assert ran() == ""
    assert (tmp_path / "engine.tar").read_bytes() == first
    # Other arguments, and what follows from them; and back.
    convert = {"script": "convert.py", "output_dir": "ckpt", "args": {"dtype": "f32"}}
    assert ran(convert=convert) == "convert build "
    assert ran() == ""
    # A config of its own shares the steps that it has in common.
    more = {"script": "build.py", "output_dir": "engine", "args": {"more": None}}
    assert ran(build=more) == "build "
    # Another script, another model, another environment.
    (examples / "fake" / "_helper.py").write_text("")
    assert ran() == "convert build "
    (tmp_path / "source" / "model.gguf").write_text("others ")
    assert ran() == "convert build "
    assert ran(env={"LEVEL": 3}) == "convert build "


def test_clean_removes_what_no_other_config_uses(tmp_path: Path, examples: Path) -> None:
    workspace = Workspace(tmp_path / "work")
    more = {"script": "build.py", "output_dir": "engine", "args": {"more": None}}
    one, two = config_of(tmp_path), config_of(tmp_path, build=more)
    for config in (one, two):
        build_engine(config, workspace, tmp_path / "e.tar", examples)
    convert, *others = outputs(workspace)
    with workspace.in_use(), pytest.raises(InvalidArgument, match="a build is running"):
        workspace.clean()
    assert len(others) == 4
    assert workspace.clean(one.fingerprint) > 0
    assert outputs(workspace) == [convert, *others[2:]]
    assert workspace.clean(one.fingerprint) == 0
    assert workspace.clean() > 0
    assert workspace.clean() == 0


@pytest.mark.parametrize(
    ("limit", "age_days", "left"),
    [
        (None, 8, "bc"),  # twice the last build's
        (None, 6, "abc"),
        ("0", 0, "c"),
        (str(1 << 40), 99, "abc"),
    ],
)
def test_a_build_removes_what_was_not_used_for_longest(
    limit: str | None,
    age_days: int,
    left: str,
    tmp_path: Path,
    examples: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if limit is not None:
        monkeypatch.setenv("BUILD_CACHE_BYTES", limit)
    workspace, made = Workspace(tmp_path / "work"), dict[str, set[Path]]()
    for name in "abc":
        before = set(outputs(workspace)) if made else set()
        with monkeypatch.context() as patch:
            patch.setenv("BUILD_CACHE_BYTES", str(1 << 40))
            config = config_of(tmp_path, env={"NAME": name})
            build_engine(config, workspace, tmp_path / f"{name}.tar", examples)
        made[name] = set(outputs(workspace)) - before
        record = workspace.root / "builds" / f"{config.fingerprint}.json"
        used = time.time() - age_days * 86_400 + (0 if name == "a" else 5)
        os.utime(record, (used, used) if name != "c" else None)
    half = workspace.root / "steps" / "0.part"
    half.mkdir()
    build_engine(config, workspace, tmp_path / "c.tar", examples)
    assert set(outputs(workspace)) == set().union(*(made[name] for name in left))
    assert not half.exists()


def test_steps_get_their_environment_variables(tmp_path: Path, examples: Path) -> None:
    script = "import os, pathlib\npathlib.Path('engine').mkdir()\n"
    script += "pathlib.Path('engine/x').write_text(os.environ['A'] + os.environ['B'])\n"
    script += "raise SystemExit('E1300 BuildConfigInvalid: ' + os.environ['A'] + os.environ['B'])"
    (examples / "fake" / "env.py").write_text(script)
    build = {"script": "env.py", "output_dir": "engine", "env": {"B": "step"}}
    config = config_of(tmp_path, convert=None, build=build, env={"A": 1, "B": "all"})
    with pytest.raises(BuildConfigInvalid, match="1step"):
        build_engine(config, Workspace(tmp_path / "work"), tmp_path / "e.tar", examples)


@pytest.mark.parametrize("declared", ["c-model/gpt2", "c-model/gpt2/1-gpu", "elsewhere"])
def test_output_directory_chosen_by_a_script_is_found(
    tmp_path: Path, examples: Path, declared: str
) -> None:
    """As the legacy converters did: it adds ``<ranks>-gpu``."""
    (examples / "fake" / "old.py").write_text(
        "import pathlib, sys\n"
        "out = pathlib.Path(sys.argv[2], '1-gpu'); out.mkdir(parents=True)\n"
        "(out / 'w').write_text('converted')\n"
    )
    (examples / "fake" / "build.py").write_text(
        BUILD.replace('"ckpt/w"', 'sys.argv[2] + "/w"').replace("import json", "import sys, json")
    )
    config = config_of(
        tmp_path,
        convert={"script": "old.py", "output_dir": declared, "args": {"out-dir": "c-model/gpt2"}},
        build={"script": "build.py", "output_dir": "engine", "args": {"model_dir": declared}},
    )
    workspace, lines = Workspace(tmp_path / "work"), list[str]()
    build_engine(config, workspace, tmp_path / "e.tar", examples, lines.append)
    told = "[convert] wrote c-model/gpt2/1-gpu" in lines
    assert told == (declared != "c-model/gpt2/1-gpu")
    unpack(tmp_path / "e.tar", tmp_path / "unpacked")
    assert (tmp_path / "unpacked/rank0.engine").read_text() == "converted"


@pytest.mark.parametrize("origin", ["config", "environment"])
def test_token_is_redacted_in_step_output(
    tmp_path: Path, examples: Path, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    build = examples / "fake" / "build.py"
    build.write_text(f"import os\nprint('has', os.environ['HF_TOKEN'])\n{build.read_text()}")
    config, workspace = config_of(tmp_path), Workspace(tmp_path / "work")
    if origin == "config":
        config = config.model_copy(update={"hf_token": SecretStr("hf_secret")})
    else:
        monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    build_engine(config, workspace, tmp_path / "e.tar", examples, lines.append)
    assert "[build] has ***" in lines
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hf_secret" not in written


def test_disk_full_in_the_log_has_its_code(tmp_path: Path, examples: Path) -> None:
    config, workspace = config_of(tmp_path), Workspace(tmp_path / "work")
    (examples / "fake" / "build.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_known_args()\n"
        "while True: print('x' * 100)"
    )
    stage = ScriptBuild(make_plan(config, Families(examples)), workspace, print).fetch()[1]
    log = workspace.log("build", workspace.output(stage))
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=r"No space left on device; [0-9.]+ MB free in "):
        build_engine(config, workspace, tmp_path / "e.tar", examples)
