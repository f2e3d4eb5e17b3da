"""The step stream against a real Triton: every token once and in order, and nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import step_client
from stack import Stack, pid_of, wait_until
from step_client import StepClient, private_ends

from cog_triton.engines.mock import mock_directory

pytestmark = pytest.mark.integration

FOREVER = 100_000
STREAMS = 64
KILLS = int(os.environ.get("PYTEST_READER_KILLS", "10"))
STOPPED_S = 20
GROWTH_MB = 20


@contextmanager
def served(stack: Stack) -> Iterator[Stack]:
    stack.command += ["--triton-only", "--engine", "mock"]
    stack.start()
    try:
        assert stack.process is not None
        wait_until(lambda: "ready in" in stack.output or stack.process.poll() is not None)
        assert stack.process.poll() is None, stack.output
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with served(Stack(tmp_path_factory.mktemp("steps"), None, MOCK_TPS="100")) as stack:
        yield stack


@pytest.fixture
def clients(mock: Stack) -> Iterator[list[StepClient]]:
    """Two open clients, which leave nothing running."""
    target, _, key = private_ends(mock)
    clients = [StepClient(target, key).until_open() for _ in range(2)]
    yield clients
    for client in clients:
        client.close()
    until_idle(mock)


@pytest.fixture(scope="module")
def passage(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    engine = mock_directory.make_engine(tmp_path_factory.mktemp("engines"))
    return mock_directory.read_model(engine).output_ids


def says(passage: list[int], count: int) -> list[int]:
    return (passage * (count // len(passage) + 1))[:count]


def active(stack: Stack) -> int:
    """Requests of front ends in the engine, as Triton's /metrics shows it."""
    for line in httpx.get(f"http://127.0.0.1:{stack.metrics}/metrics").text.splitlines():
        words = ("nv_trt_llm_request_metrics{", "engine_steps", 'request_type="active"')
        if all(word in line for word in words):
            return int(float(line.split()[-1]))
    raise AssertionError("no such metric")


def until_idle(stack: Stack) -> None:
    wait_until(lambda: active(stack) == 0)


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def memory(stack: Stack) -> Sequence[float]:
    """Megabytes of tritonserver, of the model's stub, and of the engine."""
    words = ("bin/tritonserver", "engine_steps", "backend.engine_process")
    return [rss_mb(pid_of(stack, word)) for word in words]


@contextmanager
def reader(stack: Stack, count: int, passage: list[int]) -> Iterator[subprocess.Popen[str]]:
    """A front end in a process of its own, once all of its requests have tokens."""
    target, _, key = private_ends(stack)
    arguments = [target, key, str(STREAMS), str(count), json.dumps(passage)]
    paths = [*sys.path, str(Path(step_client.__file__).parent)]
    with subprocess.Popen(
        [sys.executable, step_client.__file__, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
            yield process
        finally:
            process.kill()


def test_sixty_four_requests_get_every_token_once_and_in_order(
    clients: list[StepClient], passage: list[int]
) -> None:
    for handle in range(STREAMS):
        clients[0].submit(handle, 200 + handle)
    for handle in range(STREAMS):
        assert clients[0].until_ended(handle).end == 2
        assert clients[0].ids[handle] == says(passage, 200 + handle)
    assert clients[0].widest > STREAMS / 4, "steps do not share responses"


def test_a_cancel_ends_its_request_only(
    clients: list[StepClient], mock: Stack, passage: list[int]
) -> None:
    client = clients[0]
    client.submit(1, FOREVER)
    client.submit(2, 300)
    wait_until(lambda: len(client.ids[1]) > 5)
    wait_until(lambda: active(mock) == 2)
    client.cancel(1)
    client.cancel(77)  # an unknown one is no error
    assert client.until_ended(1).end == 3
    assert client.until_ended(2).end == 2
    assert client.ids[2] == says(passage, 300)


def test_refused_requests_are_items_with_the_coded_error(clients: list[StepClient]) -> None:
    clients[0].submit(1, 5, ())
    assert clients[0].until_ended(1)[5:7] == (
        4,
        "E1005 InvalidArgument: input_ids: empty; at least one token is required",
    )
    clients[0].submit(2, 5, inject="error", inject_after=2)
    assert str(clients[0].until_ended(2).error).startswith("E2100 TritonUnknownError: inject=error")
    assert len(clients[0].ids[2]) == 2


def test_the_model_serves_who_names_the_key_and_an_engine(mock: Stack) -> None:
    target, http, key = private_ends(mock)
    for named, replica, said in (
        ("", 0, "E1005 InvalidArgument: engine_steps: this model is for"),
        (key[:-1], 0, "E1005 InvalidArgument: engine_steps: this model is for"),
        (key, 1, "E1005 InvalidArgument: engine_steps: there is no engine 1"),
    ):
        client = StepClient(target, named, replica)
        assert client.ended.wait(60)
        assert said in client.error
        client.close()
    base = f"{mock.triton}/v2/models/engine_steps"
    for path in ("", "/config", "/stats", "/ready", "/versions/1/config"):
        assert httpx.get(base + path).status_code == 404
    for path in ("/infer", "/generate", "/generate_stream"):
        assert httpx.post(base + path, json={"call": [111]}).status_code == 404
    assert "engine_steps" not in httpx.get(f"{mock.triton}/v2/models/stats").text
    assert "engine_steps" not in httpx.post(f"{mock.triton}/v2/repository/index").text
    assert "engine_steps" in httpx.post(f"{http}/v2/repository/index").text


def test_two_front_ends_do_not_meet(clients: list[StepClient], passage: list[int]) -> None:
    for client, count in zip(clients, (90, 60), strict=True):
        client.submit(1, count)
    for client, count in zip(clients, (90, 60), strict=True):
        client.until_ended(1)
        assert client.ids[1] == says(passage, count)
        wait_until(lambda client=client: client.others[-1:] == [False])
        assert client.others[0]


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_requests_of_a_front_end_that_is_gone_are_cancelled(
    mock: Stack, passage: list[int], how: str
) -> None:
    until_idle(mock)
    if how == "killed":
        with reader(mock, FOREVER, passage):
            wait_until(lambda: active(mock) == STREAMS)
    else:
        target, _, key = private_ends(mock)
        client = StepClient(target, key).until_open()
        client.submit(1, FOREVER)
        wait_until(lambda: active(mock) == 1)
        client.close()
    until_idle(mock)


@pytest.mark.full
def test_a_reader_that_stops_for_a_while_loses_nothing(mock: Stack, passage: list[int]) -> None:
    before = memory(mock)
    with reader(mock, 3000, passage) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        stopped = memory(mock)
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.readline() == "right\n"
    after = memory(mock)
    print("MB of server, stub, engine before, stopped, after:", before, stopped, after)
    for place in (0, 1):
        assert stopped[place] - before[place] < GROWTH_MB / 2
        assert after[place] - before[place] < GROWTH_MB / 2  # 14 MB if one request has all


@pytest.mark.full
def test_readers_that_are_killed_leave_nothing_behind(mock: Stack, passage: list[int]) -> None:
    """The figures of 200 kills: PYTEST_READER_KILLS=200, and -s."""
    server = pid_of(mock, "bin/tritonserver")
    before: Sequence[float] = ()
    for number in range(KILLS):
        with reader(mock, FOREVER, passage):
            time.sleep(number % 5 / 20)  # each dies at another moment
        until_idle(mock)
        if number in (4, KILLS - 1) or not number % 20:
            print(f"MB of server, stub, engine after {number + 1} kills:", memory(mock))
        if number == 4:
            before = memory(mock)
    assert pid_of(mock, "bin/tritonserver") == server
    assert all(now - then < 2 * GROWTH_MB for now, then in zip(memory(mock), before, strict=True))


@pytest.mark.full
def test_a_dead_engine_ends_every_request_with_e2105(tmp_path: Path) -> None:
    with served(Stack(tmp_path / "dead", None, MOCK_TPS="30")) as stack:
        target, _, key = private_ends(stack)
        client = StepClient(target, key).until_open()
        for handle in range(16):
            client.submit(handle, FOREVER)
        wait_until(lambda: len(client.ids) == 16)
        os.kill(pid_of(stack, "backend.engine_process"), signal.SIGKILL)
        assert client.ended.wait(60)
        assert "E2105 TritonUnavailable: the engine's process has ended" in client.error
        client.close()
