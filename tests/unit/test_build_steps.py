"""Build steps as real processes: output, failures, cancellation and the build cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

import cog_triton
from cog_triton.artifact import engine_manifest
from cog_triton.artifact.engine_tar import unpack
from cog_triton.builder.arguments import MODEL
from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.builder.plan import Families, Script, Step, make_plan
from cog_triton.builder.run import run_build
from cog_triton.builder.step import LONGEST, run_step
from cog_triton.builder.workspace import Workspace, locked
from cog_triton.errors import (
    BuildConfigInvalid,
    BuildStepFailed,
    BuildStepTimeout,
    DiskFull,
    EngineIncompatible,
    InvalidArgument,
)

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
    family = tmp_path / "examples" / "fake"
    family.mkdir(parents=True)
    (family / "convert.py").write_text(CONVERT.replace("MODEL", repr(MODEL)))
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
    value = {key: item for key, item in value.items() if item is not None}
    return parse_config(yaml.safe_dump(value, sort_keys=False), "test")


def step_of(tmp_path: Path, text: str) -> Step:
    script = tmp_path / "script.py"
    script.write_text(text)
    return Step(
        name="build",
        script=Script("fake/script.py", (sys.executable, str(script)), script, sys.executable),
        args={},
        cwd=tmp_path,
        input=tmp_path / "in",
        output_dir=tmp_path / "out",
        env={},
    )


def build_engine(
    config: BuildConfig,
    workspace: Workspace,
    output: Path,
    examples: Path,
    echo: Callable[[str], None] = print,
    *,
    cache: bool = True,
) -> Path:
    """Plan and run the build of `config`, whose scripts are in `examples`."""
    plan = make_plan(config, workspace.of(config.fingerprint), Families(examples))
    return run_build(plan, workspace, output, echo=echo, cache=cache)


def test_build_runs_every_step_and_packs_the_engine(tmp_path: Path, examples: Path) -> None:
    lines: list[str] = []
    config, output = config_of(tmp_path), tmp_path / "deep" / "engine.tar"
    workspace = Workspace(tmp_path / "work")
    made = build_engine(config, workspace, output, examples, lines.append)
    assert made == output
    assert lines[0] == f"[package] {output.parent} is not there, and will be made"
    result = unpack(output, tmp_path / "unpacked")
    assert (tmp_path / "unpacked/rank0.engine").read_text() == "weights --dtype f16"
    assert result.manifest is not None
    assert result.manifest.engine == "tensorrt_llm"
    assert result.manifest.max_seq_len == 4
    assert result.manifest.versions["cog_triton"] == cog_triton.__version__
    assert result.manifest.versions["tensorrt_llm"] == "1.2.1"
    written = (tmp_path / "unpacked" / "build_config.yaml").read_text()
    assert parse_config(written, "packed") == config
    assert (workspace.of(config.fingerprint) / MODEL).is_symlink()
    assert not (workspace.of(config.fingerprint) / "package").exists()
    engine_manifest.verify(tmp_path / "unpacked", result.manifest, checksums=True)


def test_finished_steps_are_skipped(tmp_path: Path, examples: Path) -> None:
    workspace, runs = Workspace(tmp_path / "work"), tmp_path / "runs"

    def ran(*, cache: bool = True, **changes: object) -> str:
        """The names of the steps that a build ran."""
        runs.unlink(missing_ok=True)
        config, output = config_of(tmp_path, **changes), tmp_path / "engine.tar"
        build_engine(config, workspace, output, examples, cache=cache)
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
    # Output that someone touched is made again.
    work = workspace.of(config_of(tmp_path).fingerprint)
    (work / "engine" / "rank0.engine").write_text("damaged")
    assert ran() == "build "
    assert (tmp_path / "engine.tar").read_bytes() == first
    # A half-finished step.
    (work / "stamps" / "build.json").unlink()
    assert ran() == "build "
    # Another script, another model, another environment.
    (examples / "fake" / "_helper.py").write_text("")
    assert ran() == "convert build "
    (tmp_path / "source" / "model.gguf").write_text("others ")
    assert ran() == "convert build "
    assert ran(env={"LEVEL": 3}) == "convert build "


def test_clean_removes_work_directories(tmp_path: Path, examples: Path) -> None:
    workspace = Workspace(tmp_path / "work")
    one = config_of(tmp_path)
    two = config_of(tmp_path, env={"LEVEL": 3})
    for config in (one, two):
        build_engine(config, workspace, tmp_path / "e.tar", examples)
    with (
        locked(workspace.of(one.fingerprint)),
        pytest.raises(InvalidArgument, match="a build is running"),
    ):
        workspace.clean()
    assert workspace.of(two.fingerprint).is_dir()
    assert workspace.clean(one.fingerprint) > 0
    assert not workspace.of(one.fingerprint).exists()
    assert workspace.of(two.fingerprint).is_dir()
    assert workspace.clean() > 0
    assert workspace.clean() == 0


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
    for _ in range(2):
        lines: list[str] = []
        build_engine(
            config, Workspace(tmp_path / "work"), tmp_path / "e.tar", examples, lines.append
        )
        told = "[convert] wrote c-model/gpt2/1-gpu" in lines
        assert told == (declared != "c-model/gpt2/1-gpu")
    assert "[build] already done" in lines
    unpack(tmp_path / "e.tar", tmp_path / "unpacked")
    assert (tmp_path / "unpacked/rank0.engine").read_text() == "converted"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("pathlib.Path('out').mkdir()", "wrote nothing into out"),
        (
            "import os\nfor d in 'ab': os.makedirs(f'out/{d}'); open(f'out/{d}/w', 'w').close()",
            "wrote more than one directory below out: out/a, out/b; output_dir must name one",
        ),
    ],
)
def test_step_with_ambiguous_output_fails(tmp_path: Path, script: str, says: str) -> None:
    with pytest.raises(BuildStepFailed, match=says):
        run_step(step_of(tmp_path, f"import pathlib\n{script}"), tmp_path / "logs", print)


def test_step_that_exceeds_its_timeout_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.builder.step._GRACE_S", 0.3)
    step = replace(step_of(tmp_path, STUBBORN.replace("pids", "out.pids")), timeout=2)
    with pytest.raises(BuildStepTimeout, match="step build ran longer than its timeout of 2 s"):
        run_step(step, tmp_path / "logs", lambda _: None)
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
        run_step(step, tmp_path / "logs", lines.append)
    assert caught.value.detail.splitlines()[1:] == ["299 of 300", "end"]
    assert len(lines) < 10
    assert "[build] end" in lines
    assert "150 of 300" in (tmp_path / "logs" / "build.log").read_text("utf-8")


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

    run_step(step, tmp_path / "logs", echo)
    assert seen[:2] == [("[build] first", False), ("[build] héllo", True)]
    assert (tmp_path / "logs" / "build.log").read_text("utf-8") == "first\nhéllo\n"


def test_failure_has_step_exit_code_and_last_lines(tmp_path: Path) -> None:
    step = step_of(tmp_path, "for i in range(100): print('line', i)\nraise SystemExit(7)")
    with pytest.raises(BuildStepFailed) as caught:
        run_step(step, tmp_path / "logs", lambda _: None)
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
    run_step(step, tmp_path / "logs", lines.append, {"HF_TOKEN": secret})
    told = [text.removeprefix("[build] ") for text in lines[:-1]]
    assert len(told) > 10
    assert max(map(len, told)) <= LONGEST + len(secret)
    assert "".join(told) == line.replace(secret, "***")
    assert (tmp_path / "logs" / "build.log").read_text("utf-8") == "".join(told)


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


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), SystemExit(1)])
def test_error_of_the_echo_ends_the_step(tmp_path: Path, error: BaseException) -> None:
    def echo(_line: str) -> None:
        raise error

    step = step_of(tmp_path, "while True: print('still here', flush=True)")
    with pytest.raises(type(error)):
        run_step(step, tmp_path / "logs", echo)


def test_disk_full_in_a_script_has_its_code(tmp_path: Path) -> None:
    step = step_of(tmp_path, "open('/dev/full', 'w').write('x' * 9999)")
    with pytest.raises(DiskFull, match=r"(?s)step build ended with exit code 1 .*No space left"):
        run_step(step, tmp_path / "logs", lambda _: None)


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
        run_step(step_of(small_disk, f"import sys; {script}"), tmp_path / "logs", lambda _: None)


def test_disk_full_in_the_log_has_its_code(tmp_path: Path, examples: Path) -> None:
    config, workspace = config_of(tmp_path), Workspace(tmp_path / "work")
    logs = workspace.of(config.fingerprint) / "logs"
    logs.mkdir(parents=True)
    (logs / "build.log").symlink_to("/dev/full")
    (examples / "fake" / "build.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_known_args()\n"
        "while True: print('x' * 100)"
    )
    with pytest.raises(DiskFull, match=r"No space left on device; [0-9.]+ MB free in "):
        build_engine(config, workspace, tmp_path / "e.tar", examples)


def test_coded_error_of_a_script_is_raised_unchanged(tmp_path: Path) -> None:
    step = step_of(
        tmp_path, "print('working'); raise SystemExit('E1305 EngineIncompatible: no yarn')"
    )
    with pytest.raises(EngineIncompatible, match=r"^E1305 .*\[build\] no yarn$"):
        run_step(step, tmp_path / "logs", lambda _: None)


def test_step_without_output_fails(tmp_path: Path) -> None:
    with pytest.raises(BuildStepFailed, match="wrote nothing into out"):
        run_step(step_of(tmp_path, "pass"), tmp_path / "logs", lambda _: None)


def test_killed_step_fails(tmp_path: Path) -> None:
    step = step_of(tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(BuildStepFailed, match="exit code 137"):
        run_step(step, tmp_path / "logs", lambda _: None)


def test_processes_left_by_a_step_are_ended(tmp_path: Path) -> None:
    step = step_of(
        tmp_path,
        "import pathlib, subprocess, sys\npathlib.Path('out').mkdir()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "pathlib.Path('out/pid').write_text(str(child.pid))",
    )
    run_step(step, tmp_path / "logs", lambda _: None)
    assert gone(int((tmp_path / "out" / "pid").read_text()))


def test_foreign_model_directory_is_not_replaced(tmp_path: Path, examples: Path) -> None:
    config, workspace = config_of(tmp_path), Workspace(tmp_path / "work")
    (workspace.of(config.fingerprint) / MODEL).mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="not this build's link"):
        build_engine(config, workspace, tmp_path / "e.tar", examples)


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
from cog_triton.builder.config import load_config
from cog_triton.builder.plan import Families
from cog_triton.builder.plan import make_plan
from cog_triton.builder.run import run_build
from cog_triton.builder.workspace import Workspace
from cog_triton.builder import step
from cog_triton.errors import CogTritonError
step._GRACE_S = 0.3
work, config, examples = map(Path, sys.argv[1:])
config, workspace = load_config(config), Workspace(work)
plan = make_plan(config, workspace.of(config.fingerprint), Families(examples))
try:
    run_build(plan, workspace, work / "e.tar", echo=print)
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
    work = Workspace(root).of(config.fingerprint)
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(root), str(tmp_path / "c.yaml"), str(examples)],
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
