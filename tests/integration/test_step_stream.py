"""The step stream against a real Triton: every token once and in order, and nobody left behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from stack import Stack, pid_of, wait_until
from step_client import StepClient, private_port

from cog_triton.engines.mock import mock_directory

pytestmark = pytest.mark.integration

FREED_S = 60
FOREVER = 100_000


@contextmanager
def served(stack: Stack) -> Iterator[Stack]:
    stack.start()
    try:
        assert stack.process is not None
        wait_until(lambda: "ready in" in stack.output or stack.process.poll() is not None, 60)
        assert stack.process.poll() is None, stack.output
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("steps"), None, MOCK_STEP_MS="5")
    stack.command += ["--triton-only", "--engine", "mock"]
    with served(stack):
        yield stack


@pytest.fixture
def client(mock: Stack) -> Iterator[StepClient]:
    client = StepClient(private_port(mock)).until_open()
    yield client
    client.close()
    wait_until(lambda: active(mock) == 0, FREED_S)


@pytest.fixture(scope="module")
def passage(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    engine = mock_directory.make_engine(tmp_path_factory.mktemp("engines"))
    return mock_directory.read_model(engine).output_ids


def says(passage: list[int], count: int) -> list[int]:
    return [passage[place % len(passage)] for place in range(count)]


def active(stack: Stack) -> int:
    """Requests that the step model has unanswered, as Triton's /metrics shows it."""
    for line in httpx.get(f"http://127.0.0.1:{stack.metrics}/metrics").text.splitlines():
        words = ("nv_trt_llm_request_metrics{", "engine_steps", 'request_type="active"')
        if all(word in line for word in words):
            return int(float(line.split()[-1]))
    return 0


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def test_sixty_four_requests_get_every_token_once_and_in_order(
    client: StepClient, passage: list[int]
) -> None:
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda handle: client.submit(handle, 200 + handle), range(1, 65)))
    for handle, (status, answer) in enumerate(answers, 1):
        assert status == 200, answer
        assert answer["finish_reason"] == "length"
        assert answer["output_token_count"] == 200 + handle
        client.until_ended(handle)
        assert client.ids(handle) == says(passage, 200 + handle)
        assert client.steps[answer["step_number"]][-1].end or any(
            item.handle == handle and item.end for item in client.steps[answer["step_number"]]
        )
    assert max(len(items) for items in client.steps.values()) > 32, "steps do not share responses"
    assert len(client.epochs) == 1


def test_a_stop_ends_its_request_alone(client: StepClient, passage: list[int]) -> None:
    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(client.submit, 1, FOREVER)
        other = pool.submit(client.submit, 2, 300)
        wait_until(lambda: len(client.ids(1)) > 5)
        assert client.command("stop", step_handle=1)[0] == 200
        status, answer = stopped.result()
        assert (status, answer["finish_reason"]) == (200, "cancelled")
        assert client.until_ended(1).end == 3
        assert answer["output_token_count"] == len(client.ids(1)) < FOREVER
        assert other.result()[1]["output_token_count"] == 300
    client.until_ended(2)
    assert client.ids(2) == says(passage, 300)
    assert client.command("stop", step_handle=1)[0] == 200


def test_a_stop_that_overtakes_its_request_counts(client: StepClient) -> None:
    assert client.command("stop", step_handle=7)[0] == 200
    status, answer = client.submit(7, FOREVER)
    assert (status, answer["finish_reason"], answer["output_token_count"]) == (200, "cancelled", 0)
    assert client.until_ended(7).end == 3
    assert client.submit(8, 3)[1]["finish_reason"] == "length"


def test_lost_steps_are_sent_again_as_far_as_they_are_kept(client: StepClient) -> None:
    client.acks = False
    assert client.submit(1, 50)[0] == 200
    client.until_ended(1)
    last = client.numbers[-1]
    client.command("ack", step_number=last - 20)
    status, answer = client.command("resend", step_number=1)
    assert (status, answer["step_number"]) == (200, last - 19)
    wait_until(lambda: client.resent[-1:] == [last])
    assert client.resent == list(range(last - 19, last + 1))
    client.acks = True
    assert client.submit(2, 5)[0] == 200
    client.until_ended(2)
    assert client.numbers == list(range(1, client.numbers[-1] + 1))


def test_heartbeats_tell_the_last_number(client: StepClient) -> None:
    assert client.submit(1, 5)[0] == 200
    client.until_ended(1)
    seen = len(client.heartbeats)
    wait_until(lambda: len(client.heartbeats) > seen + 2)
    assert client.heartbeats[-1] == client.numbers[-1]


def test_refused_requests_are_items_and_error_answers(client: StepClient) -> None:
    for handle, values, code in (
        (1, {"prompt": ()}, "E1005 InvalidArgument: input_ids"),
        (2, {"temperature": -1.0}, "E1005 InvalidArgument"),
        (3, {"beam_width": 4}, "E1005 InvalidArgument: beam_width=4"),
        (4, {"inject": "error", "inject_after": 2}, "E2100 TritonUnknownError: inject=error"),
    ):
        status, answer = client.submit(handle, 5, **values)
        assert status != 200
        assert answer["error"].startswith(code), answer
        item = client.until_ended(handle)
        assert (item.end, item.error) == (4, answer["error"])
    assert len(client.ids(4)) == 2


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"step_stream": "0" * 32, "step_command": "submit", "step_handle": 1}, "E2105"),
        ({"step_stream": "0" * 32, "step_command": "ack", "step_number": 1}, "E2105"),
        ({"step_stream": "0" * 32, "step_command": "nonsense"}, "E1005"),
        ({"step_stream": "short", "step_command": "open"}, "E1005"),
        ({"step_command": "open"}, "E1005"),
        ({"step_stream": "0" * 32}, "E1005"),
        ({"step_stream": "0" * 32, "step_command": "ack", "steps": 1}, "E1005"),
    ],
)
def test_commands_without_a_stream_are_coded_errors(
    mock: Stack, values: dict[str, object], code: str
) -> None:
    url = f"http://127.0.0.1:{private_port(mock)}/v2/models/engine_steps/generate"
    answer = httpx.post(url, json=values, timeout=30)
    assert answer.status_code != 200
    assert answer.json()["error"].startswith(code)


def test_a_stream_has_one_owner(client: StepClient) -> None:
    second = StepClient(client.port, client.name, acks=False)
    second.ended.wait(30)
    assert second.error.startswith("E1005 InvalidArgument: step_stream")
    assert client.command("submit", step_handle=5, step_number=1)[0] != 200
    assert client.submit(2**41, 5)[1]["error"].startswith("E1005 InvalidArgument: step_handle")
    assert client.submit(9, 3)[0] == 200


def test_two_streams_do_not_meet(client: StepClient, passage: list[int]) -> None:
    other = StepClient(client.port).until_open()
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.submit(client.submit, 1, 90), pool.submit(other.submit, 1, 60)
            assert first.result()[0] == second.result()[0] == 200
        for each, count in ((client, 90), (other, 60)):
            each.until_ended(1)
            assert each.ids(1) == says(passage, count)
    finally:
        other.close()


@pytest.mark.parametrize("how", ["hangs up", "acknowledges nothing", "closes"])
def test_requests_of_a_front_end_that_is_gone_are_cancelled(mock: Stack, how: str) -> None:
    client = StepClient(private_port(mock), acks=how != "acknowledges nothing").until_open()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.submit, handle, FOREVER) for handle in range(8)]
        wait_until(lambda: how == "acknowledges nothing" or len(client.ids(7)) > 3)
        if how == "hangs up":
            client.hang_up()
        elif how == "closes":
            client.command("close")
        for answer in answers:
            assert answer.result()[1]["finish_reason"] == "cancelled"
    client.ended.wait(30)
    wait_until(lambda: active(mock) == 0, FREED_S)
    assert client.command("ack", step_number=1)[1]["error"].startswith("E2105")


def test_the_door_does_not_publish_the_model(mock: Stack) -> None:
    base = f"{mock.triton}/v2/models/engine_steps"
    for path in ("", "/config", "/stats", "/ready", "/versions/1/config"):
        assert httpx.get(base + path).status_code == 404
    for path in ("/infer", "/generate", "/generate_stream"):
        assert httpx.post(base + path, json={"step_command": "open"}).status_code == 404
    assert "engine_steps" not in httpx.get(f"{mock.triton}/v2/models/stats").text
    assert "engine_steps" not in httpx.post(f"{mock.triton}/v2/repository/index").text
    assert "tensorrt_llm" in httpx.post(f"{mock.triton}/v2/repository/index").text


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("flat"), None)
    stack.command += ["--triton-only", "--engine", "mock", "--tps", "0"]
    with served(stack):
        yield stack


def test_memory_is_bounded_while_a_client_reads_nothing_and_then_all_arrives(
    fast: Stack, passage: list[int]
) -> None:
    # A stream ends whose client acknowledges nothing for a second, as on a busy machine.
    assert any(reads_late(fast, passage) for _ in range(5))


def reads_late(stack: Stack, passage: list[int]) -> bool:
    """Read nothing for some seconds, then all; returns whether the stream lived so long."""
    count, streams = 20_000, 32
    client = StepClient(private_port(stack), acks=False).until_open()
    beats = threading.Event()

    def acknowledge_nothing_new() -> None:
        """One step at a time, so that the stream lives while almost nothing moves."""
        number = 0
        while not beats.wait(0.3):
            client.command("ack", step_number=(number := number + 1))

    server = pid_of(stack, "bin/tritonserver")
    with ThreadPoolExecutor(streams + 1) as pool:
        before = rss_mb(server)
        client.reads.clear()
        pool.submit(acknowledge_nothing_new)
        answers = [pool.submit(client.submit, handle, count) for handle in range(streams)]
        time.sleep(5)
        held = rss_mb(server) - before
        client.reads.set()
        beats.set()
        client.acks = True
        told = [answer.result()[1] for answer in answers]
    assert held < 64
    handles = range(streams)
    wait_until(lambda: client.ended.is_set() or all(ended(client, handle) for handle in handles))
    lived = not client.ended.is_set()
    if lived:
        assert [answer["output_token_count"] for answer in told] == [count] * streams
        assert all(client.ids(handle) == says(passage, count) for handle in handles)
        assert len(client.numbers) < streams * count / 4
    client.close()
    return lived


def ended(client: StepClient, handle: int) -> bool:
    return bool(client.items[handle]) and bool(client.items[handle][-1].end)


def test_a_request_whose_end_was_to_wait_is_answered_when_its_stream_is_lost(fast: Stack) -> None:
    """More steps than are kept without an acknowledgement, and no acknowledgement."""
    client = StepClient(private_port(fast), acks=False).until_open()
    status, answer = client.submit(1, 2000)
    assert status == 200
    assert answer["output_token_count"] == 2000
    assert client.ended.wait(FREED_S)
    assert len(client.ids(1)) < 2000
    client.close()
    wait_until(lambda: active(fast) == 0, FREED_S)


def test_a_dead_engine_ends_every_request_with_e2105(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "dead", None)
    stack.command += ["--triton-only", "--engine", "mock", "--tps", "30"]
    with served(stack):
        client = StepClient(private_port(stack)).until_open()
        with ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(client.submit, handle, FOREVER) for handle in range(16)]
            wait_until(lambda: all(len(client.ids(handle)) > 2 for handle in range(16)))
            os.kill(pid_of(stack, "backend.engine_process"), signal.SIGKILL)
            for handle in range(16):
                item = client.until_ended(handle)
                assert item.error == (
                    "E2105 TritonUnavailable: the engine's process has ended; try again later"
                )
            assert client.ended.wait(60)
            for answer in answers:
                if answer.exception() is None:  # Triton is being stopped meanwhile
                    assert "E2105" in answer.result()[1]["error"]


def test_a_real_engine_streams_its_steps(engine_dir: Path, tmp_path: Path) -> None:
    stack = Stack(tmp_path / "openvino", str(engine_dir))
    stack.command.append("--triton-only")
    with served(stack):
        client = StepClient(private_port(stack)).until_open()
        values = {"runtime_top_k": 1, "return_log_probs": True}
        prompt = [504, 3575, 282, 4649, 314]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(client.submit, n, 12, prompt, **values) for n in range(4)]
            assert all(answer.result()[1]["output_token_count"] == 12 for answer in answers)
        body = {"input_ids": prompt, "input_lengths": 5, "request_output_len": 12, "end_id": -1}
        body |= {"runtime_top_k": 1, "exclude_input_in_output": True}
        direct = httpx.post(
            f"{stack.triton}/v2/models/tensorrt_llm/generate", json=body, timeout=60
        )
        for handle in range(4):
            client.until_ended(handle)
            assert client.ids(handle) == direct.json()["output_ids"]
            for item in client.items[handle]:
                assert len(item.log_probs) == len(item.ids)
                assert all(value <= 0 for value in item.log_probs)
        client.close()
