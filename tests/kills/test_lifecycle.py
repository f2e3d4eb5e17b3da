"""Server lifecycle: start-up, failures, restarts, drain and shutdown."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from layers import full
from stack import REPOSITORY, Stack, pid_of, processes_of, shared_memory, text_of, wait_until

pytestmark = pytest.mark.integration

SECONDS_TO_FAIL = 60
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "40"}
"""An engine that costs no CPU, for what does not depend on the engine."""
IN_RUNNER = {"COG_PREDICT_TYPE_STUB": "predict.py:Predictor", "COG_MAX_CONCURRENCY": "32"}


@pytest.mark.parametrize("number", [full(signal.SIGINT), signal.SIGTERM])
def test_sigint_and_sigterm_stop_all_processes(
    new_stack: Callable[..., Stack], number: int
) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    stack.until_ready()
    pids = processes_of(stack.work_dir)
    assert shared_memory(pids)
    code, output = stack.finish(number)
    assert code == 0
    assert "Ready in" in output
    assert "curl -sN -XPOST" in output
    assert processes_of(stack.work_dir) == {}
    assert shared_memory(pids) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(stack.triton)


def test_no_process_outlives_a_killed_parent(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    stack.until_ready()
    pids = processes_of(stack.work_dir)
    os.kill(pid_of(stack, "cog_triton serve"), signal.SIGKILL)
    wait_until(lambda: not processes_of(stack.work_dir))
    wait_until(lambda: not shared_memory(pids))


@pytest.mark.full
def test_a_server_stopped_during_start_up_ends(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    os.kill(pid_of(stack, "cog_triton.front.server"), signal.SIGSTOP)
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert "E2106 TritonStartFailed: process " in output
    assert "of the server was stopped during start-up" in output


@pytest.mark.full
def test_shared_memory_of_a_server_killed_at_once_is_removed_at_the_next_start(
    new_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    stack.until_ready()
    pids = list(processes_of(stack.work_dir))
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none can clean up after another
        for pid in pids:
            os.kill(pid, number)
    assert stack.finish()[0] == -signal.SIGKILL
    wait_until(lambda: not processes_of(stack.work_dir))
    assert shared_memory(pids)
    stack.start()
    stack.until_ready()
    assert shared_memory(pids) == []


def test_tritonserver_killed_during_start_up_is_a_coded_error(
    new_stack: Callable[..., Stack],
) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    os.kill(pid_of(stack, "bin/tritonserver"), signal.SIGKILL)
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert "E2106 TritonStartFailed: tritonserver exited with code 137" in output
    assert "Traceback" not in output
    assert processes_of(stack.work_dir) == {}


@pytest.mark.full
def test_model_that_fails_to_load_reports_its_own_error(
    new_stack: Callable[..., Stack], engine_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "engine"
    broken.mkdir()
    for path in engine_dir.iterdir():
        if path.name != "cog-triton.json":
            (broken / path.name).symlink_to(path)
    (broken / "openvino_model.xml").unlink()
    (broken / "openvino_model.xml").write_text("<net/>")
    stack = new_stack(broken)
    stack.start()
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert "E2106" in output
    assert "the engine did not load" in output


@pytest.mark.parametrize("kind", ["flipped", full("climbing")])
def test_corrupt_engine_tar_is_a_coded_error(
    new_stack: Callable[..., Stack], engine_tar: Path, tmp_path: Path, kind: str
) -> None:
    tar = tmp_path / "engine.tar"
    if kind == "climbing":
        with tarfile.open(tar, "w") as archive:
            archive.addfile(tarfile.TarInfo("../escaped"))
    else:
        raw = bytearray(engine_tar.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        tar.write_bytes(raw)
    stack = new_stack(tar)
    stack.start()
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert "E1306 EngineCorrupt" in output
    assert "Traceback" not in output
    assert not (tmp_path / "escaped").exists()
    assert not list(stack.work_dir.glob("engines/*"))


@pytest.mark.full
def test_cog_alone_serves_from_the_runner_directory(
    new_stack: Callable[..., Stack], engine_dir: Path
) -> None:
    stack = new_stack(
        ENGINE_DIR=str(engine_dir),
        COG_PREDICT_TYPE_STUB="predict.py:Predictor",
        COG_MAX_CONCURRENCY="32",
        SYSTEM_PROMPT="You are a parrot.",
        STOP_SEQUENCES="Paris",
        MAX_SEQUENCE_LENGTH="100",
        LOG_PERFORMANCE_METRICS="true",
    )
    stack.command = [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"]
    stack.cwd = REPOSITORY / "runner"
    stack.start()
    seen = set()
    wait_until(lambda: seen.add(stack.health()) or "READY" in seen, 120)
    assert seen <= {"UNREACHABLE", "STARTING", "READY"}
    assert "STARTING" in seen
    prediction = stack.predict("What is the capital of France?", system_prompt="", temperature=0)
    assert text_of(prediction) == "The capital of France is "
    assert "Serverside tokens per second" in prediction["logs"]
    assert "was clamped to" in prediction["logs"]
    paths = httpx.get(f"{stack.url}/openapi.json").json()["paths"]
    assert "/predictions" in paths
    assert httpx.get(f"{stack.triton}/v2/health/ready").status_code == 200
    without_a_limit_the_context_is_the_limit(stack)


@pytest.mark.full
def test_cog_alone_has_no_keys(new_stack: Callable[..., Stack], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"name": "a", "sha256": "0" * 64}))
    stack = new_stack(**MOCK, **IN_RUNNER, COG_TRITON_KEYS=str(keys))
    stack.command = [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"]
    stack.cwd = REPOSITORY / "runner"
    stack.start()
    wait_until(lambda: stack.health() == "SETUP_FAILED")
    logs = httpx.get(f"{stack.url}/health-check").json()["setup"]["logs"]
    assert "E1005 InvalidArgument: COG_TRITON_KEYS=" in logs


def without_a_limit_the_context_is_the_limit(stack: Stack) -> None:
    (model,) = httpx.get(f"{stack.own}/v1/models").json()["data"]
    assert model["max_model_len"] == 100
    asked = {"model": model["id"], "prompt": [28120] * 90, "ignore_eos": True}
    answer = httpx.post(f"{stack.own}/v1/completions", json=asked, timeout=60).json()
    assert answer["usage"]["total_tokens"] == 100
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.full
def test_a_second_start_reuses_the_unpacked_engine(
    new_stack: Callable[..., Stack], engine_tar: Path
) -> None:
    stack = new_stack(engine_tar)
    for unpacks in (True, False):
        stack.start()
        pid_of(stack, "bin/tritonserver")  # which is started when the engine is there
        assert ("Unpacking" in stack.output) is unpacks
        stack.close()


@pytest.mark.full
@pytest.mark.parametrize("word", ["backend.engine_process", "postprocessing/1/model.py"])
def test_without_resumption_a_death_fails_requests_with_a_code(
    new_stack: Callable[..., Stack], word: str
) -> None:
    stack = new_stack(**MOCK, RESUME="0")
    stack.start()
    stack.until_ready()
    with stack.stream("Tell me a long story.", max_tokens=4000) as events:
        outputs = (kind for kind, _ in events if kind == "output")
        next(outputs)
        os.kill(pid_of(stack, word), signal.SIGKILL)
        last = json.dumps(list(events)[-1])
    assert "E2105 TritonUnavailable" in last
    wait_until(lambda: stack.health() == "UNHEALTHY")
    assert "E2105" in stack.predict()["error"]
    wait_until(lambda: stack.health() == "READY")
    assert text_of(stack.predict(max_tokens=3))
    assert stack.finish(signal.SIGTERM)[0] == 0


def test_repeated_crashes_of_triton_end_the_server_in_a_container(
    new_stack: Callable[..., Stack],
) -> None:
    """As images start it: the reaper is PID 1, and the server its grandchild."""
    stack = new_stack(**MOCK, **IN_RUNNER, TRITON_MAX_RESTARTS="0")
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    reaper = str(REPOSITORY / "cog_triton" / "system" / "reaper.py")
    init = [*namespace, sys.executable, "-S", "-I", reaper, "--"]
    stack.command = [*init, sys.executable, "-m", "cog_triton.serve"]
    stack.cwd = REPOSITORY / "runner"
    stack.start()
    wait_until(lambda: stack.health() == "READY")
    with stack.stream("Tell me a long story.", max_tokens=4000) as events:
        next(kind for kind, _ in events if kind == "output")
        os.kill(pid_of(stack, "bin/tritonserver"), signal.SIGKILL)
        last = json.dumps(list(events)[-1])
    assert "E2105" in last
    assert stack.finish()[0] == 1
    wait_until(lambda: not processes_of(stack.work_dir))


@pytest.mark.full
def test_serve_reports_why_it_gave_up(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(**MOCK, TRITON_MAX_RESTARTS="0")
    stack.start()
    stack.until_ready()
    os.kill(pid_of(stack, "bin/tritonserver"), signal.SIGKILL)
    code, output = stack.finish()
    assert code == 1
    assert "given up after 0 restarts in a row (TRITON_MAX_RESTARTS)" in output
    assert processes_of(stack.work_dir) == {}


@pytest.mark.full
def test_the_death_of_another_rank_ends_every_request_and_the_server(
    new_stack: Callable[..., Stack],
) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    stack.until_ready()
    with stack.stream("Tell me a long story.", max_tokens=4000) as events:
        next(kind for kind, _ in events if kind == "output")
        os.kill(pid_of(stack, "-m cog_triton serve"), signal.SIGUSR1)
        assert "E2105" in json.dumps(list(events)[-1])
    code, output = stack.finish()
    assert code == 1
    assert "E2105 TritonUnavailable: another rank has died (SIGUSR1)" in output
    assert processes_of(stack.work_dir) == {}


@pytest.mark.full
def test_the_server_answers_before_cog_listens_and_beside_a_dead_engine(
    new_stack: Callable[..., Stack],
) -> None:
    stack = new_stack(**MOCK, RESUME="0")
    health, schema = f"{stack.url}/health-check", f"{stack.url}/openapi.json"

    def get(url: str) -> httpx.Response:
        """The first answer to a request that was sent before there was a server."""
        while True:
            with suppress(httpx.ConnectError):
                return httpx.get(url, timeout=60)

    stack.start()
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(get, (health, schema))
    assert (first.status_code, first.json()) == (503, {"status": "STARTING"})
    assert (second.status_code, "E2105" in second.text) == (503, True)
    stack.until_ready()
    paths = httpx.get(schema).json()["paths"]
    os.kill(pid_of(stack, "bin/tritonserver"), signal.SIGKILL)
    wait_until(lambda: "E2105" in httpx.get(health).json().get("user_healthcheck_error", ""))
    assert httpx.get(schema).json()["paths"] == paths
