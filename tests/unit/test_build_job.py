"""Build jobs as real processes, and the runner that cancels them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cog import CancelationException, Secret
from http_replies import serving

from cog_triton.builder.config import parse_config
from cog_triton.builder.job import Job, JobRunner
from cog_triton.builder.predictor import Predictor, output_dir
from cog_triton.builder.workspace import Workspace, locked
from cog_triton.errors import (
    BuildConfigInvalid,
    BuildStepFailed,
    InvalidArgument,
    ModelUnavailable,
    UnknownArgument,
)
from cog_triton.settings import load_settings
from cog_triton.system import reaper

ROOT = Path(__file__).parents[2]
CONFIG = """
model_id: /no/such/model
example_name: openvino
build:
  script: build.py
  output_dir: {}
  args: {{checkpoint_dir: model, output_dir: engine}}
"""


def job_of(tmp_path: Path, **values: object) -> Job:
    return Job.model_validate(
        {"output": tmp_path / "engine.tar", "workspace": tmp_path / "work", **values}
    )


def run_module(file: Path, stdout: int | object = subprocess.DEVNULL) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "cog_triton.builder.job", str(file)],
        stdout=stdout,  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    return done.returncode, done.stderr


def test_job_file_is_removed_and_error_is_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(job_of(tmp_path, config=CONFIG.format("engine")).model_dump_json())
    code, said = run_module(file)
    assert code == 1
    assert said.startswith("E1304 ModelUnavailable: model_id: '/no/such/model': does not exist")
    assert not file.exists()
    assert not (tmp_path / "engine.tar").exists()


@pytest.mark.parametrize("word", ["hf_a b", "hf_\0", "hf_\u00e9", " "])
def test_invalid_token_is_refused_and_not_shown(tmp_path: Path, word: str) -> None:
    says = r"^E1005 InvalidArgument: hf_token: must be one word, of [A-Za-z, ]+$"
    with pytest.raises(InvalidArgument, match=says):
        job_of(tmp_path, config=CONFIG.format("engine"), hf_token=word).run(print)


def test_full_disk_has_an_error_code(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(job_of(tmp_path, config=CONFIG.format("engine")).model_dump_json())
    with Path("/dev/full").open("w") as full:
        assert "E2302 DiskFull: [Errno 28]" in run_module(file, full)[1]


def test_other_work_directories_are_removed_unless_in_use(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    one, two, three = (
        workspace.of(parse_config(CONFIG.format(name), "test").fingerprint)
        for name in ("one", "two", "three")
    )
    assert len({one, two, three}) == 3
    for directory in (one, two, three):
        directory.mkdir(parents=True)
        (directory / "file").write_text("")
    with locked(one):
        workspace.remove_others(two)
    assert sorted((tmp_path / "builds").iterdir()) == sorted([one, two])
    assert (two / "file").exists()


def test_runner_echoes_lines_and_raises_the_error(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ModelUnavailable, match="'/no/such/model': does not exist"):
        JobRunner().run(job_of(tmp_path, config=CONFIG.format("e")), lines.append)
    assert lines[:2] == ["[config] the text", "[config]   model_id: /no/such/model"]
    # Longer than any one argument or variable of a process may be.
    long = CONFIG.format("e") + "#" * 300_000
    with pytest.raises(ModelUnavailable):
        JobRunner().run(job_of(tmp_path, config=long), lines.append)
    mistakes = "".join(f"mistake_{number}: 1\n" for number in range(1000))
    with pytest.raises(BuildConfigInvalid) as caught:
        JobRunner().run(job_of(tmp_path, config=CONFIG.format("e") + mistakes), lines.append)
    assert "mistake_0: unknown key" in caught.value.detail
    assert "mistake_999: unknown key" in caught.value.detail


def test_arguments_are_checked_before_the_model_is_located(tmp_path: Path) -> None:
    wrong = CONFIG.format("e").replace("output_dir: engine", "ouptut_dir: engine")
    with pytest.raises(UnknownArgument, match="has no --ouptut_dir; did you mean") as e:
        JobRunner().run(job_of(tmp_path, config=wrong), lambda _: None)
    assert e.value.detail.endswith("\nbuild.args.output_dir is missing: build.py requires it")


def test_error_without_a_code_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yaml.py").write_text("1 / 0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BuildStepFailed, match=r"exit code 1:\n(?s:.*)ZeroDivisionError"):
        JobRunner().run(job_of(tmp_path, config=CONFIG.format("e")), lambda _: None)


def interrupt(thread: threading.Thread) -> None:
    """Raise Cog's cancellation in the thread, as Cog does."""
    raising = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raising(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(CancelationException))


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_thread_stops_the_job_first(tmp_path: Path, times: int) -> None:
    asked, leave = threading.Event(), threading.Event()
    lines: list[str] = []
    ends: list[BaseException] = []
    runner = JobRunner()

    def never(request: BaseHTTPRequestHandler) -> None:
        asked.set()
        leave.wait()

    def predict(url: str) -> None:
        try:
            runner.run(job_of(tmp_path, config=url), lines.append)
        except BaseException as error:  # noqa: BLE001
            ends.append(error)

    before = reaper.descendants(os.getpid())
    with serving(never) as url:
        thread = threading.Thread(target=predict, args=(url,))
        thread.start()
        assert asked.wait(30)
        for _ in range(times):
            interrupt(thread)
            time.sleep(0.05)
        thread.join(30)
        leave.set()
    assert [type(end) for end in ends] == [CancelationException]
    # The next job starts only when the last one is gone.
    with pytest.raises(BuildConfigInvalid):
        runner.run(job_of(tmp_path, config="/no/such/config"), lambda _: None)
    assert reaper.descendants(os.getpid()) <= before
    assert lines == ["E2303 BuildCancelled: the build was interrupted"]


@pytest.mark.parametrize(
    ("token", "url", "named"),
    [("hf_123", "ftp://host", "upload_url"), (None, "x", "upload_url")],
)
def test_invalid_inputs_are_refused(token: str | None, url: str | None, named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^E1005 InvalidArgument: {named}: ") as caught:
        Predictor().run("/no/such/config", Secret(token) if token else None, url)
    assert "hf_123" not in str(caught.value)


def test_output_directory_from_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_dir(load_settings()) == tmp_path
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("COG_TRITON_OUTPUT_DIR", "out")
    assert output_dir(load_settings()) == tmp_path / "out"
    monkeypatch.setenv("COG_TRITON_OUTPUT_DIR", "nowhere")
    with pytest.raises(InvalidArgument, match=r"COG_TRITON_OUTPUT_DIR='.*/nowhere'"):
        output_dir(load_settings())
