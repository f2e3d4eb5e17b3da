"""Steps as real processes: their output, their failures, their end, and what is not redone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import cog_triton
from cog_triton import engine_manifest
from cog_triton.build import stamps
from cog_triton.build.config import BuildConfig, parse_config
from cog_triton.build.plan import Step
from cog_triton.build.steps import run_build, run_step
from cog_triton.engine_tar import unpack
from cog_triton.errors import (
    BuildStepFailed,
    EngineIncompatible,
    InvalidArgument,
)

CONVERT = """
import pathlib, sys
pathlib.Path("runs").open("a").write("convert ")
out = pathlib.Path("ckpt"); out.mkdir()
(out / "w").write_text(pathlib.Path("model/model.gguf").read_text() + " ".join(sys.argv[1:]))
"""
BUILD = """
import json, pathlib
pathlib.Path("runs").open("a").write("build ")
out = pathlib.Path("engine"); out.mkdir()
(out / "rank0.engine").write_text(pathlib.Path("ckpt/w").read_text())
limits = {"max_input_len": 3, "max_seq_len": 4, "max_batch_size": 2}
(out / "config.json").write_text(json.dumps({"build_config": limits}))
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
    family = tmp_path / "examples" / "fake"
    family.mkdir(parents=True)
    (family / "convert.py").write_text(CONVERT)
    (family / "build.py").write_text(BUILD)
    (family / "stubborn.py").write_text(STUBBORN)
    return family.parent


def config_of(tmp_path: Path, **changes: object) -> BuildConfig:
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
    return parse_config(yaml.safe_dump(value), "test")


def step_of(tmp_path: Path, text: str) -> Step:
    script = tmp_path / "script.py"
    script.write_text(text)
    return Step(
        name="build",
        script=script,
        argv=(sys.executable, str(script)),
        cwd=tmp_path,
        input=tmp_path / "in",
        output_dir=tmp_path / "out",
    )


def test_a_build_runs_every_step_and_packs_the_engine(tmp_path: Path, examples: Path) -> None:
    lines: list[str] = []
    config, output = config_of(tmp_path), tmp_path / "deep" / "engine.tar"
    made = run_build(config, tmp_path / "work", output, echo=lines.append, examples=examples)
    assert made == output
    result = unpack(output, tmp_path / "unpacked")
    assert (tmp_path / "unpacked/rank0.engine").read_text() == "weights --dtype f16"
    assert result.manifest is not None
    assert result.manifest.engine == "tensorrt_llm"
    assert result.manifest.max_seq_len == 4
    assert result.manifest.versions["cog_triton"] == cog_triton.__version__
    written = (tmp_path / "unpacked" / "build_config.yaml").read_text()
    assert parse_config(written, "packed") == config
    assert (tmp_path / "work" / "model").is_symlink()
    assert not (tmp_path / "work" / "package").exists()
    engine_manifest.verify(tmp_path / "unpacked", result.manifest, checksums=True)


def test_finished_steps_are_not_redone(tmp_path: Path, examples: Path) -> None:
    work = tmp_path / "work"

    def build(**changes: object) -> str:
        (work / "runs").unlink(missing_ok=True)
        config, output = config_of(tmp_path, **changes), tmp_path / "engine.tar"
        run_build(config, work, output, echo=lambda _: None, examples=examples)
        return (work / "runs").read_text() if (work / "runs").exists() else ""

    assert build() == "convert build "
    first = (tmp_path / "engine.tar").read_bytes()
    assert build() == ""
    assert (tmp_path / "engine.tar").read_bytes() == first
    # Other arguments, and what follows from them.
    convert = {"script": "convert.py", "output_dir": "ckpt", "args": {"dtype": "f32"}}
    assert build(convert=convert) == "convert build "
    assert build() == "convert build "
    # Output that someone touched is made again.
    (work / "engine" / "rank0.engine").write_text("damaged")
    assert build() == "build "
    assert (tmp_path / "engine.tar").read_bytes() == first
    # A half-finished step.
    (work / "stamps" / "build.json").unlink()
    assert build() == "build "
    # Another script, another model.
    (examples / "fake" / "_helper.py").write_text("")
    assert build() == "convert build "
    (tmp_path / "source" / "model.gguf").write_text("others ")
    assert build() == "convert build "


def test_output_is_passed_on_live_and_kept(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    gate = tmp_path / "gate"
    step = step_of(
        tmp_path,
        "import pathlib, sys, time\nprint('first')\n"
        f"gate = pathlib.Path({str(gate)!r})\n"
        "while not gate.exists(): time.sleep(0.01)\n"
        "print('h\\u00e9llo', file=sys.stderr)\npathlib.Path('out').mkdir()\n",
    )

    def echo(line: str) -> None:
        seen.append((line, gate.exists()))
        gate.write_text("")  # the script waits for its first line to have been seen

    run_step(step, tmp_path / "logs", echo)
    assert seen == [("[build] first", False), ("[build] héllo", True)]
    assert (tmp_path / "logs" / "build.log").read_text("utf-8") == "first\nhéllo\n"


def test_a_failure_carries_step_exit_code_and_last_lines(tmp_path: Path) -> None:
    step = step_of(tmp_path, "for i in range(100): print('line', i)\nraise SystemExit(7)")
    with pytest.raises(BuildStepFailed) as caught:
        run_step(step, tmp_path / "logs", lambda _: None)
    lines = str(caught.value).splitlines()
    assert lines[0] == "E2300 BuildStepFailed: step build ended with exit code 7:"
    assert lines[1:] == [f"line {i}" for i in range(60, 100)]


def test_a_coded_error_of_a_script_stays_what_it_is(tmp_path: Path) -> None:
    step = step_of(
        tmp_path, "print('working'); raise SystemExit('E1305 EngineIncompatible: no yarn')"
    )
    with pytest.raises(EngineIncompatible, match=r"^E1305 .*\[build\] no yarn$"):
        run_step(step, tmp_path / "logs", lambda _: None)


def test_a_step_that_writes_nothing_has_failed(tmp_path: Path) -> None:
    with pytest.raises(BuildStepFailed, match=r"wrote no .*out"):
        run_step(step_of(tmp_path, "pass"), tmp_path / "logs", lambda _: None)


def test_a_killed_step_has_failed(tmp_path: Path) -> None:
    step = step_of(tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(BuildStepFailed, match="exit code 137"):
        run_step(step, tmp_path / "logs", lambda _: None)


def test_processes_a_step_leaves_behind_are_ended(tmp_path: Path) -> None:
    step = step_of(
        tmp_path,
        "import pathlib, subprocess, sys\npathlib.Path('out').mkdir()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "pathlib.Path('out/pid').write_text(str(child.pid))",
    )
    run_step(step, tmp_path / "logs", lambda _: None)
    assert gone(int((tmp_path / "out" / "pid").read_text()))


def test_a_work_directory_serves_one_build_at_a_time(tmp_path: Path, examples: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with stamps.locked(work), pytest.raises(InvalidArgument, match="another build"):
        run_build(
            config_of(tmp_path), work, tmp_path / "e.tar", echo=lambda _: None, examples=examples
        )


def test_a_directory_that_is_not_ours_is_left_alone(tmp_path: Path, examples: Path) -> None:
    (tmp_path / "work" / "model").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="not this build's link"):
        run_build(
            config_of(tmp_path),
            tmp_path / "work",
            tmp_path / "e.tar",
            echo=lambda _: None,
            examples=examples,
        )


def gone(pid: int, seconds: float = 20.0) -> bool:
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
from cog_triton.build.config import load_config
from cog_triton.build.steps import run_build
from cog_triton.errors import CogTritonError
work, config, examples = map(Path, sys.argv[1:])
try:
    run_build(load_config(config), work, work / "engine.tar", echo=print, examples=examples)
except CogTritonError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def stuck_build(
    tmp_path: Path, examples: Path
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A builder process in the middle of a step, and the pids of the step and its child."""
    build = {"script": "stubborn.py", "output_dir": "engine"}
    (tmp_path / "c.yaml").write_text(config_of(tmp_path, build=build).to_yaml())
    work = tmp_path / "work"
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(work), str(tmp_path / "c.yaml"), str(examples)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cog_triton.__file__).parents[1])},
    )
    with process:
        try:
            while not (work / "pids").exists():
                assert process.poll() is None, process.stderr
                time.sleep(0.02)
            yield process, [int(pid) for pid in (work / "pids").read_text().split()]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_cancelling_ends_the_whole_step(
    number: signal.Signals, stuck_build: tuple[subprocess.Popen[str], list[int]]
) -> None:
    process, pids = stuck_build
    process.send_signal(number)
    assert process.stderr is not None
    assert "E2303 BuildCancelled: stopped during step build" in process.stderr.read()
    assert process.wait() == 1
    assert all(gone(pid) for pid in pids)


def test_a_killed_builder_leaves_no_step_behind(
    stuck_build: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, pids = stuck_build
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in pids)
