"""Builds from config to engine.tar: steps that are skipped, their environment, what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr
from sample_builds import build_engine, config_of, outputs, step_of
from sample_builds import examples as examples  # a fixture
from stack import wait_until

import cog_triton
from cog_triton.artifact.engine_tar import unpack
from cog_triton.builder.config import parse_config
from cog_triton.builder.plan import Step
from cog_triton.builder.step import LONGEST, run_step, written
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import (
    BuildConfigInvalid,
    BuildStepFailed,
    DiskFull,
    EngineIncompatible,
    InvalidArgument,
)


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


# The convert step says that it runs, and waits for the test to let it go on.
HELD = """
import pathlib, time
pathlib.Path("../../../running").touch()
while not pathlib.Path("../../../go").exists():
    time.sleep(0.02)
"""


def test_second_build_of_a_config_waits_and_takes_the_step_of_the_first(
    tmp_path: Path, examples: Path
) -> None:
    script = examples / "fake" / "convert.py"
    script.write_text(HELD + script.read_text())
    workspace = Workspace(tmp_path / "work")
    waits = threading.Event()

    def build(name: str, lines: list[str]) -> bytes:
        def echo(line: str) -> None:
            lines.append(line)
            if "another build is running the same step" in line:
                waits.set()

        build_engine(config_of(tmp_path), workspace, tmp_path / name, examples, echo)
        return (tmp_path / name).read_bytes()

    said: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(build, "one.tar", [])
        try:
            wait_until((tmp_path / "running").exists)
            second = threads.submit(build, "two.tar", said)
            assert waits.wait(60), said
            with pytest.raises(InvalidArgument, match="a build is running"):
                workspace.clean()
        finally:
            (tmp_path / "go").touch()
        assert first.result(60) == second.result(60)
    assert "[convert] already done by another build" in said
    assert (tmp_path / "runs").read_text() == "convert build "


def ran(
    step: Step,
    cwd: Path,
    echo: Callable[[str], None] = lambda _: None,
    log: Path | None = None,
    **secrets: str,
) -> str:
    """Run a step; the directory that it wrote."""
    run_step(step, cwd, log or cwd / "log", echo, secrets)
    return written(step, cwd)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("", "wrote nothing into out"),
        ("pathlib.Path('out').mkdir()", "wrote nothing into out"),
        (
            "import os\nfor d in 'ab': os.makedirs(f'out/{d}'); open(f'out/{d}/w', 'w').close()",
            "wrote more than one directory below out: out/a, out/b; output_dir must name one",
        ),
    ],
)
def test_step_with_ambiguous_output_fails(tmp_path: Path, script: str, says: str) -> None:
    with pytest.raises(BuildStepFailed, match=says):
        ran(step_of(tmp_path, f"import pathlib\n{script}"), tmp_path)


def test_output_is_echoed_live_and_logged(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    gate = tmp_path / "gate"
    step = step_of(
        tmp_path,
        "import pathlib, sys, time\nprint('first')\n"
        f"gate = pathlib.Path({str(gate)!r})\n"
        "while not gate.exists(): time.sleep(0.01)\n"
        "print('h\\u00e9llo', file=sys.stderr)\npathlib.Path('out').mkdir()\n"
        "pathlib.Path('out/w').touch()\n",
    )

    def echo(line: str) -> None:
        seen.append((line, gate.exists()))
        gate.write_text("")  # the script waits for its first line to have been seen

    ran(step, tmp_path, echo)
    assert seen[:2] == [("[build] first", False), ("[build] héllo", True)]
    assert (tmp_path / "log").read_text("utf-8") == "first\nhéllo\n"


def test_endless_line_is_split_and_redacted(tmp_path: Path) -> None:
    secret, lines = "hf_" + "s3cret" * 5, []
    line = "".join(f"{i:09} {secret} " for i in range(5000))
    step = step_of(
        tmp_path,
        "import os, pathlib\nsecret = os.environ['HF_TOKEN']\npathlib.Path('out').mkdir()\n"
        "pathlib.Path('out/w').touch()\n"
        "print(''.join(f'{i:09} {secret} ' for i in range(5000)), end='')",
    )
    ran(step, tmp_path, lines.append, HF_TOKEN=secret)
    told = [text.removeprefix("[build] ") for text in lines[:-1]]
    assert len(told) > 10
    assert max(map(len, told)) <= LONGEST + len(secret)
    assert "".join(told) == line.replace(secret, "***")
    assert (tmp_path / "log").read_text("utf-8") == "".join(told)


def test_error_of_the_echo_ends_the_step(tmp_path: Path) -> None:
    def echo(_line: str) -> None:
        raise BrokenPipeError(32, "gone")

    step = step_of(tmp_path, "while True: print('still here', flush=True)")
    with pytest.raises(BrokenPipeError):
        ran(step, tmp_path, echo)


def test_disk_full_in_a_script_has_its_code(tmp_path: Path) -> None:
    step = step_of(tmp_path, "open('/dev/full', 'w').write('x' * 9999)")
    with pytest.raises(DiskFull, match=r"(?s)step build ended with exit code 1 .*No space left"):
        ran(step, tmp_path)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import numpy; numpy.zeros(20 << 20, 'u1').tofile('weights')", "Not enough free space"),
        ("sys.exit(f\"{open('weights', 'wb', 0).write(bytes(20 << 20))} written\")", " written"),
    ],
    ids=["refused", "short"],
)
def test_script_without_room_for_its_files_has_its_code(
    script: str, why: str, small_disk: Path, tmp_path: Path
) -> None:
    with pytest.raises(DiskFull, match=why):
        ran(step_of(small_disk, f"import sys; {script}"), small_disk, log=tmp_path / "log")


def test_coded_error_of_a_script_is_raised_unchanged(tmp_path: Path) -> None:
    step = step_of(
        tmp_path, "print('working'); raise SystemExit('E1305 EngineIncompatible: no yarn')"
    )
    with pytest.raises(EngineIncompatible, match=r"^E1305 .*\[build\] no yarn$"):
        ran(step, tmp_path)


def test_processes_left_by_a_step_are_ended(tmp_path: Path) -> None:
    step = step_of(
        tmp_path,
        "import pathlib, subprocess, sys\npathlib.Path('out').mkdir()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "pathlib.Path('out/pid').write_text(str(child.pid))",
    )
    ran(step, tmp_path)
    assert gone(int((tmp_path / "out" / "pid").read_text()))


def gone(pid: int, seconds: float = 60.0) -> bool:
    """Whether the process is no more (or a zombie) within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


BUILDER = """
import sys
from pathlib import Path
from cog_triton.builder.config import load_config
from cog_triton.builder.plan import Families
from cog_triton.builder.plan import make_plan
from cog_triton.builder.run import run_build
from cog_triton.builder.script_build import ScriptBuild
from cog_triton.builder.workspace import Workspace
from cog_triton.builder import step
from cog_triton.errors import CogTritonError
step._GRACE_S = 0.3
work, config, examples = map(Path, sys.argv[1:])
plan = make_plan(load_config(config), Families(examples))
try:
    run_build(ScriptBuild(plan, Workspace(work), print), work / "e.tar")
except CogTritonError as error:
    sys.exit(str(error))
"""
Stuck = tuple[subprocess.Popen[str], list[int]]


@pytest.fixture
def stuck_build(tmp_path: Path, examples: Path) -> Iterator[Stuck]:
    """A builder process in the middle of a step, and the pids of the step and its child."""
    build = {"script": "stubborn.py", "output_dir": "engine"}
    config, root = config_of(tmp_path, build=build), tmp_path / "work"
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(root), str(tmp_path / "c.yaml"), str(examples)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cog_triton.__file__).parents[1])},
    )
    with process:
        try:
            while not (found := list(root.glob("steps/*.part/pids"))):
                assert process.poll() is None, process.stderr
                time.sleep(0.02)
            yield process, [int(pid) for pid in found[0].read_text().split()]
        finally:
            process.kill()


def test_cancellation_ends_all_processes_of_a_step(stuck_build: Stuck) -> None:
    process, pids = stuck_build
    process.terminate()
    assert process.stderr is not None
    assert "E2303 BuildCancelled: stopped during step build" in process.stderr.read()
    assert process.wait() == 1
    assert all(gone(pid) for pid in pids)


def test_killed_builder_leaves_no_process(stuck_build: Stuck) -> None:
    process, pids = stuck_build
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in pids)
