"""How the server starts, fails, stops and dies."""

import json
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from stack import REPOSITORY, Stack, processes_of, wait_until

pytestmark = pytest.mark.integration

SECONDS_TO_FAIL = 15


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def make(engine: object = None, **environment: str) -> Stack:
        name = tmp_path / f"work{len(stacks)}"
        stacks.append(Stack(name, None if engine is None else str(engine), **environment))
        return stacks[-1]

    yield make
    for item in stacks:
        item.close()


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("cog_triton_")}


def pid_of(stack: Stack, word: str) -> int:
    """The process of this stack whose own program (not the reaper's argument) is `word`."""

    def look() -> int:
        for pid, line in processes_of(stack.work_dir).items():
            if word in line and "reaper.py" not in line:
                return pid
        return 0

    return int(wait_until(look))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_stop_everything(
    make_stack: Callable[..., Stack], engine_dir: Path, number: int
) -> None:
    before = shared_memory()
    stack = make_stack(engine_dir)
    stack.start()
    stack.until_ready()
    code, output = stack.finish(number)
    assert code == 0
    assert "Ready in" in output
    assert "curl -sN -XPOST" in output
    assert processes_of(stack.work_dir) == {}
    assert shared_memory() <= before
    with pytest.raises(httpx.ConnectError):
        httpx.get(stack.triton)


def test_sigterm_lets_a_running_prediction_end(
    make_stack: Callable[..., Stack], engine_dir: Path
) -> None:
    stack = make_stack(engine_dir)
    stack.start()
    stack.until_ready()
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(stack.predict("Hi.", max_tokens=60, min_tokens=60))
    )
    asking.start()
    wait_until(lambda: stack.engine_requests() == 1)
    code, _ = stack.finish(signal.SIGTERM)
    asking.join()
    assert code == 0
    assert answers[0]["status"] == "succeeded"
    assert answers[0]["metrics"]["output_token_count"] == 60


@pytest.mark.parametrize("victim", ["cog_triton serve", "cog.server.http", "_run_worker"])
def test_nothing_outlives_a_parent_that_is_killed(
    make_stack: Callable[..., Stack], engine_dir: Path, victim: str
) -> None:
    before = shared_memory()
    stack = make_stack(engine_dir)
    stack.start()
    stack.until_ready()
    os.kill(pid_of(stack, victim), signal.SIGKILL)
    wait_until(lambda: not processes_of(stack.work_dir), 20)
    wait_until(lambda: shared_memory() <= before, 5)


def test_killing_tritonserver_during_start_up_is_a_coded_error_in_seconds(
    make_stack: Callable[..., Stack], engine_dir: Path
) -> None:
    stack = make_stack(engine_dir)
    stack.start()
    os.kill(pid_of(stack, "bin/tritonserver"), signal.SIGKILL)
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert "E2106 TritonStartFailed: tritonserver exited with code 137" in output
    assert "Traceback" not in output
    assert processes_of(stack.work_dir) == {}


def test_a_model_that_does_not_load_ends_with_its_own_error(
    make_stack: Callable[..., Stack], engine_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "engine"
    broken.mkdir()
    for path in engine_dir.iterdir():
        if path.name != "cog-triton.json":
            (broken / path.name).symlink_to(path)
    (broken / "openvino_model.xml").unlink()
    (broken / "openvino_model.xml").write_text("<net/>")
    stack = make_stack(broken)
    stack.start()
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert "E2106" in output
    assert "the engine did not load" in output


def corrupt(source: Path, target: Path, kind: str) -> Path:
    raw = bytearray(source.read_bytes())
    if kind == "flipped":
        raw[len(raw) // 2] ^= 0xFF
    elif kind == "truncated":
        del raw[len(raw) // 2 :]
    elif kind == "garbage":
        raw = bytearray(os.urandom(4096))
    elif kind == "empty":
        raw = bytearray()
    target.write_bytes(raw)
    return target


@pytest.mark.parametrize("kind", ["flipped", "truncated", "garbage", "empty", "climbing"])
def test_a_corrupt_engine_tar_is_a_coded_error_in_seconds(
    make_stack: Callable[..., Stack], engine_tar: Path, tmp_path: Path, kind: str
) -> None:
    tar = tmp_path / "engine.tar"
    if kind == "climbing":
        with tarfile.open(tar, "w") as archive:
            archive.addfile(tarfile.TarInfo("../escaped"))
    else:
        corrupt(engine_tar, tar, kind)
    stack = make_stack(tar)
    stack.start()
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert "E1306 EngineCorrupt" in output
    assert "Traceback" not in output
    assert not (tmp_path / "escaped").exists()
    assert not list(stack.work_dir.glob("engines/*"))


@pytest.mark.parametrize(
    ("engine", "environment", "words"),
    [
        ("/nowhere/engine.tar", {}, ["E1304", "/nowhere/engine.tar"]),
        (None, {"ENGINE_DIR": "/nowhere/engine"}, ["E1304", "/nowhere/engine"]),
        (None, {"ENGINE_DIR": "/etc"}, ["E1306", "/etc", "openvino"]),
        ("http://127.0.0.1:9/engine.tar", {}, ["E1304", "127.0.0.1:9"]),
        (None, {"TRITON_HTTP_PORT": "eight"}, ["E1005", "TRITON_HTTP_PORT", "eight"]),
        (None, {"MAX_SEQUENCE_LENGTH": "-4"}, ["E1005", "MAX_SEQUENCE_LENGTH", "-4"]),
        (None, {"COG_TRITON_CONFIG": "/nowhere.yaml"}, ["E1202", "/nowhere.yaml"]),
    ],
)
def test_bad_settings_are_coded_errors_in_seconds(
    make_stack: Callable[..., Stack],
    engine: str | None,
    environment: dict[str, str],
    words: list[str],
) -> None:
    stack = make_stack(engine, **environment)
    stack.start()
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    for word in words:
        assert word in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ["not valid YAML"]),
        ("tensorrt_lm: {args: {}}", ["tensorrt_lm", "did you mean 'tensorrt_llm'"]),
        ("tensorrt_llm: {args: {kv_cache_bg: 2}}", ["kv_cache_bg", "did you mean 'kv_cache_gb'"]),
        ("tensorrt_llm: {args: {max_batch_size: many}}", ["max_batch_size='many'"]),
        ("postprocessing: {args: {postprocessing_instance_count: 64}}", ["must be 1"]),
    ],
)
def test_a_bad_serve_config_is_a_coded_error_in_seconds(
    make_stack: Callable[..., Stack],
    engine_dir: Path,
    tmp_path: Path,
    text: str,
    words: list[str],
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    stack = make_stack(engine_dir, COG_TRITON_CONFIG=str(config))
    stack.start()
    code, output = stack.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    for word in ["E1202", *words]:
        assert word in output


def test_a_port_that_is_taken_is_named(make_stack: Callable[..., Stack], stack: Stack) -> None:
    other = make_stack("engine.tar")
    other.environment["TRITON_GRPC_PORT"] = str(stack.grpc)
    other.start()
    code, output = other.finish(seconds=SECONDS_TO_FAIL)
    assert code == 1
    assert f"E1005 InvalidArgument: TRITON_GRPC_PORT={stack.grpc}" in output


def test_cog_alone_serves_from_the_runner_directory(
    make_stack: Callable[..., Stack], engine_dir: Path
) -> None:
    stack = make_stack(
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
    wait_until(lambda: seen.add(stack.health()) or "READY" in seen)
    assert seen <= {"UNREACHABLE", "STARTING", "READY"}
    assert "STARTING" in seen
    prediction = stack.predict("What is the capital of France?", system_prompt="", temperature=0)
    assert "".join(prediction["output"]) == "The capital of France is "
    assert "Serverside tokens per second" in prediction["logs"]
    assert "was clamped to" in prediction["logs"]
    paths = httpx.get(f"{stack.url}/openapi.json").json()["paths"]
    assert "/predictions" in paths


def test_cog_alone_tells_setup_failed_and_why(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(ENGINE_DIR="/nowhere", COG_PREDICT_TYPE_STUB="predict.py:Predictor")
    stack.command = [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"]
    stack.cwd = REPOSITORY / "runner"
    stack.start()
    wait_until(lambda: stack.health() == "SETUP_FAILED", SECONDS_TO_FAIL)
    assert "E1304 ModelUnavailable" in httpx.get(f"{stack.url}/health-check").text
    answer = httpx.post(f"{stack.url}/predictions", json={"input": {"prompt": "Hi."}})
    assert answer.status_code >= 400


def test_a_second_start_reuses_the_unpacked_engine(
    make_stack: Callable[..., Stack], engine_tar: Path
) -> None:
    first = make_stack(engine_tar)
    first.start()
    first.until_ready()
    assert "Unpacking" in first.finish(signal.SIGTERM)[1]
    first.start()
    first.until_ready()
    assert "Unpacking" not in first.finish(signal.SIGTERM)[1]


@pytest.mark.parametrize(
    "word", ["bin/tritonserver", "engines.engine_process", "tensorrt_llm/1/model.py"]
)
def test_the_death_of_a_child_ends_requests_and_the_server_with_a_code(
    make_stack: Callable[..., Stack], engine_dir: Path, word: str
) -> None:
    stack = make_stack(engine_dir)
    stack.start()
    stack.until_ready()
    with stack.stream("Tell me a long story.", max_tokens=4000) as events:
        outputs = (kind for kind, _ in events if kind == "output")
        next(outputs)
        os.kill(pid_of(stack, word), signal.SIGKILL)
        died = time.monotonic()
        last = json.dumps(list(events)[-1])
    assert "E2105 TritonUnavailable" in last
    assert time.monotonic() - died < 5
    wait_until(lambda: stack.health() == "UNHEALTHY", 10)
    code, output = stack.finish()
    assert code == 1
    assert "E2105 TritonUnavailable" in output
