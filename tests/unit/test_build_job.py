"""Builds of the builder's predictor as real processes, and the runner that cancels them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cog import CancelationException, Secret
from http_replies import reply, serving

from cog_triton.builder.predictor import BuildRunner, Predictor, output_dir
from cog_triton.builder.upload import check, put
from cog_triton.errors import (
    BuildConfigInvalid,
    BuildStepFailed,
    InvalidArgument,
    ModelUnavailable,
)
from cog_triton.settings import load_settings
from cog_triton.system import reaper
from cog_triton.system.ports import free_ports

ROOT = Path(__file__).parents[2]
Echo = Callable[[str], None]
CONFIG = """
model_id: /no/such/model
example_name: openvino
build:
  script: build.py
  output_dir: {}
  args: {{model_dir: model, output_dir: engine}}
"""


def run(tmp_path: Path, config: str, echo: Echo = print, **values: str) -> None:
    runner = BuildRunner(tmp_path / "work", tmp_path / "engine.tar")
    runner.run({"config": config, **values}, echo)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"config": CONFIG.format("e")}), "E1304 ModelUnavailable: model_id: '/no/such"),
        (json.dumps({"config": "", "more": 1}), "E1005 InvalidArgument: stdin: more: "),
    ],
)
def test_porcelain_takes_a_request_from_stdin(text: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cog_triton", "build", "--porcelain"],
        cwd=tmp_path,
        input=text,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {says}")
    assert not (tmp_path / "engine.tar").exists()


def test_invalid_token_is_refused_and_not_shown(tmp_path: Path) -> None:
    says = r"^E1005 InvalidArgument: hf_token: must be one word, of [A-Za-z, ]+$"
    with pytest.raises(InvalidArgument, match=says):
        run(tmp_path, CONFIG.format("e"), hf_token="hf_\u00e9")


def test_runner_echoes_lines_and_raises_the_error(tmp_path: Path) -> None:
    lines: list[str] = []
    # Longer than any one argument or variable of a process may be.
    long = CONFIG.format("e") + "#" * 300_000
    with pytest.raises(ModelUnavailable, match="'/no/such/model': does not exist"):
        run(tmp_path, long, lines.append)
    assert lines[:2] == ["[config] the text", "[config]   model_id: /no/such/model"]
    mistakes = "".join(f"mistake_{number}: 1\n" for number in range(1000))
    with pytest.raises(BuildConfigInvalid, match=r"(?s)mistake_0: unkn.*mistake_999: unknown key"):
        run(tmp_path, CONFIG.format("e") + mistakes, lines.append)


def test_error_without_a_code_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yaml.py").write_text("1 / 0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BuildStepFailed, match=r"exit code 1:\n(?s:.*)ZeroDivisionError"):
        run(tmp_path, CONFIG.format("e"))


def interrupt(thread: threading.Thread) -> None:
    raising = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raising(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(CancelationException))


def test_interrupted_thread_stops_the_job_first(tmp_path: Path) -> None:
    asked, leave = threading.Event(), threading.Event()
    lines: list[str] = []
    ends: list[BaseException] = []
    runner = BuildRunner(tmp_path / "work", tmp_path / "engine.tar")

    def never(request: BaseHTTPRequestHandler) -> None:
        asked.set()
        leave.wait()

    def predict(url: str) -> None:
        try:
            runner.run({"config": url}, lines.append)
        except BaseException as error:  # noqa: BLE001
            ends.append(error)

    before = reaper.descendants(os.getpid())
    with serving(never) as url:
        thread = threading.Thread(target=predict, args=(url,))
        thread.start()
        assert asked.wait(30)
        for _ in range(2):
            interrupt(thread)
            time.sleep(0.05)
        thread.join(30)
        leave.set()
    assert [type(end) for end in ends] == [CancelationException]
    # The next job starts only when the last one is gone.
    with pytest.raises(BuildConfigInvalid):
        runner.run({"config": "/no/such/config"}, print)
    assert reaper.descendants(os.getpid()) <= before
    assert lines == ["E2303 BuildCancelled: the build was interrupted"]


@pytest.mark.parametrize(("token", "url"), [("hf_123", "ftp://host"), (None, "x")])
def test_invalid_inputs_are_refused(token: str | None, url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^E1005 InvalidArgument: upload_url") as caught:
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


CONTENT = bytes(range(256)) * 12_000  # 3 MB, so more than one read


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "engine.tar"
    path.write_bytes(CONTENT)
    return path


class Store:
    """Answers with `statuses` one after another, the last one for ever; 0 hangs up."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[tuple[str, str | None, bytes]] = []

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        self.seen.append((request.path, request.headers["Transfer-Encoding"], body))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status:
            reply(request, status)
        request.close_connection = True


def uploaded(store: Callable[[BaseHTTPRequestHandler], None], tar: Path) -> list[str]:
    lines: list[str] = []
    with serving(store) as url:
        put(tar, f"{url}/e.tar?signature=secret", lines.append, pauses_s=(0, 0))
    assert not any("secret" in line for line in lines)
    return lines


@pytest.mark.parametrize("status", [200, 204])
def test_upload_sends_the_file_with_its_length(tar: Path, status: int) -> None:
    store = Store(status)
    lines = uploaded(store, tar)
    assert store.seen == [("/e.tar?signature=secret", None, CONTENT)]
    assert lines[-1] == "[upload] 100% of 3 MB"


@pytest.mark.parametrize("trouble", [503, 429, 0])
def test_transient_errors_are_retried_from_the_start(tar: Path, trouble: int) -> None:
    store = Store(trouble, trouble, 200)
    lines = uploaded(store, tar)
    assert [body for _, _, body in store.seen] == [CONTENT] * 3
    assert len([line for line in lines if "again in 0 s" in line]) == 2


@pytest.mark.parametrize("status", [301, 403])
def test_refusals_are_not_retried(tar: Path, status: int) -> None:
    store = Store(status)
    with pytest.raises(InvalidArgument, match=f"upload_url='.*/e.tar': HTTP {status}"):
        uploaded(store, tar)
    assert len(store.seen) == 1


def test_error_after_the_last_retry(tar: Path) -> None:
    store = Store(503)
    with pytest.raises(BuildStepFailed, match=r"/e.tar failed 3 times: HTTP 503"):
        uploaded(store, tar)
    assert len(store.seen) == 3


def test_unreachable_server_is_an_error(tar: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/e.tar?secret"
    with pytest.raises(BuildStepFailed, match="refused") as caught:
        put(tar, url, lambda _: None, pauses_s=())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["e.tar", "ftp://h/e", "https:///e", "http://[::1/"])
def test_invalid_upload_url_is_refused_before_the_build(url: str) -> None:
    with pytest.raises(InvalidArgument, match="upload_url"):
        check(url)
    check("https://host/e.tar?signature=x")
