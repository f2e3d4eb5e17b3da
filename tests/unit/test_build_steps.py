"""Build steps as real processes: output, failures, timeouts and cancellation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sample_builds import STUBBORN, config_of, step_of
from sample_builds import examples as examples  # a fixture

import cog_triton
from cog_triton.builder.plan import Step
from cog_triton.builder.step import LONGEST, run_step, written
from cog_triton.errors import BuildStepFailed, BuildStepTimeout, DiskFull, EngineIncompatible


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


def test_step_that_exceeds_its_timeout_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.builder.step._GRACE_S", 0.3)
    step = replace(step_of(tmp_path, STUBBORN.replace("pids", "out.pids")), timeout=2)
    # The time of the step runs out once it has started its child.
    begun = (tmp_path / "out.pids").exists
    clock = SimpleNamespace(monotonic=lambda: 3.0 if begun() else 0.0)
    monkeypatch.setattr("cog_triton.builder.step.time", clock)
    with pytest.raises(BuildStepTimeout, match="step build ran longer than its timeout of 2 s"):
        ran(step, tmp_path)
    pids = [int(pid) for pid in (tmp_path / "out.pids").read_text().split()]
    assert all(gone(pid) for pid in pids)


def test_redrawn_line_keeps_its_last_state(tmp_path: Path) -> None:
    lines: list[str] = []
    step = step_of(
        tmp_path,
        "import pathlib, sys\npathlib.Path('out').mkdir()\npathlib.Path('out/w').touch()\n"
        "for i in range(300): sys.stdout.write(f'\\r{i} of 300')\nprint('\\nend')\n"
        "raise SystemExit(1)",
    )
    with pytest.raises(BuildStepFailed) as caught:
        ran(step, tmp_path, lines.append)
    assert caught.value.detail.splitlines()[1:] == ["299 of 300", "end"]
    assert len(lines) < 10
    assert "[build] end" in lines
    assert "150 of 300" in (tmp_path / "log").read_text("utf-8")


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


def test_failure_has_step_exit_code_and_last_lines(tmp_path: Path) -> None:
    step = step_of(tmp_path, "for i in range(100): print('line', i)\nraise SystemExit(7)")
    with pytest.raises(BuildStepFailed) as caught:
        ran(step, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("E2300 BuildStepFailed: step build ended with exit code 7 (its ")
    assert lines[1:] == [f"line {i}" for i in range(95, 100)]


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


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), SystemExit(1)])
def test_error_of_the_echo_ends_the_step(tmp_path: Path, error: BaseException) -> None:
    def echo(_line: str) -> None:
        raise error

    step = step_of(tmp_path, "while True: print('still here', flush=True)")
    with pytest.raises(type(error)):
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


def test_killed_step_fails(tmp_path: Path) -> None:
    step = step_of(tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(BuildStepFailed, match="exit code 137"):
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_cancellation_ends_all_processes_of_a_step(number: int, stuck_build: Stuck) -> None:
    process, pids = stuck_build
    process.send_signal(number)
    assert process.stderr is not None
    assert "E2303 BuildCancelled: stopped during step build" in process.stderr.read()
    assert process.wait() == 1
    assert all(gone(pid) for pid in pids)


def test_killed_builder_leaves_no_process(stuck_build: Stuck) -> None:
    process, pids = stuck_build
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in pids)
