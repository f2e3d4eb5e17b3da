"""Graceful drain: a stop lets what runs end, on every API and in every way to run."""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
from layers import full
from resume_clients import ENGINE, MOCK, Clients, Told, arrived, until_arrived
from stack import REPOSITORY, Stack, pids_of, processes_of, shared_memory, wait_until
from tritonclient.utils import triton_to_np_dtype
from webhook_receiver import Receiver

pytestmark = pytest.mark.integration

TOKENS = 160
IMAGE = {"COG_PREDICT_TYPE_STUB": "predict.py:Predictor", "COG_MAX_CONCURRENCY": "32"}
"""What images have in their environment."""


@pytest.fixture
def make_stack(new_stack: Callable[..., Stack]) -> Callable[..., Stack]:
    def make(way: str = "cog-triton serve", **environment: str) -> Stack:
        image = way == "image"
        settings = {**MOCK, "SERVED_MODEL_NAME": "any", **(IMAGE if image else {}), **environment}
        stack = new_stack(**settings)
        if image:  # their process 1 is a reaper around it
            stack.command = [sys.executable, "-m", "cog_triton.serve"]
            stack.cwd = REPOSITORY / "runner"
        elif way == "triton only":
            stack.command.append("--triton-only")
        stack.start()
        return stack

    return make


def ready(stack: Stack) -> Stack:
    wait_until(lambda: stack.health() == "READY")
    return stack


def generate_stream(stack: Stack, tokens: int, flowing: threading.Event) -> str:
    """Text of a stream of Triton's own API."""
    ids: list[int] = []
    body = {"input_ids": [10, 11, 12], "input_lengths": 3, "request_output_len": tokens}
    body |= {"streaming": True}
    url = f"{stack.triton}/v2/models/tensorrt_llm/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                found = json.loads(line[6:])
                assert "error" not in found, found
                made = found["output_ids"]
                ids += made if isinstance(made, list) else [made]
                flowing.set()
    return str(ids)


@contextmanager
def held(stack: Stack) -> Iterator[None]:
    """A stream that ends with the context, and the drain not before: no test is too slow for it."""
    body = {"input_ids": [10], "input_lengths": 1, "request_output_len": 8000, "streaming": True}
    url = f"{stack.triton}/v2/models/tensorrt_llm/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        assert next(response.iter_lines()).startswith("data: ")
        yield


class Load:
    """Streams of every API, three of each, which began before the stop."""

    def __init__(self, stack: Stack, pool: ThreadPoolExecutor) -> None:
        self.clients = Clients(stack)
        self.alone = list(pool.map(lambda kind: self.clients.run(kind, TOKENS), range(3)))
        self.raw_alone = generate_stream(stack, TOKENS, threading.Event())
        before = arrived(stack)
        self.answers: list[Future[Told]] = [
            pool.submit(self.clients.run, number, TOKENS) for number in range(9)
        ]
        flowing = [threading.Event() for _ in range(3)]
        self.raw = [pool.submit(generate_stream, stack, TOKENS, event) for event in flowing]
        until_arrived(stack, before + len(self.answers))
        self.clients.until_flowing(self.answers, 6)
        for event in flowing:
            assert event.wait(60)

    def check(self) -> None:
        """Every stream is whole, to the character."""
        for number, answer in enumerate(self.answers):
            assert answer.result(120) == self.alone[number % 3]
        assert [one.result(120) for one in self.raw] == [self.raw_alone] * 3


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert "E2105 TritonUnavailable: the server is stopping" in response.text
    assert int(response.headers["retry-after"]) > 0
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("way", [full("cog-triton serve"), "image"])
def test_a_stop_cuts_no_stream_of_any_api(make_stack: Callable[..., Stack], way: str) -> None:
    stack = ready(make_stack(way, DRAIN_TIMEOUT="600"))
    idle = socket.create_connection(("127.0.0.1", stack.openai), timeout=60)
    kept = httpx.Client(timeout=60)
    with ThreadPoolExecutor(16) as pool, idle, kept, held(stack):
        load = Load(stack, pool)
        assert kept.get(f"{stack.own}/v1/models").status_code == 200
        assert stack.process is not None
        stack.process.send_signal(signal.SIGTERM)
        wait_until(lambda: stack.health() == "UNHEALTHY")
        assert idle.recv(1) == b""
        prompt = {"model": "any", "prompt": "Hi."}
        for url, body in (
            (f"{stack.url}/predictions", {"input": {"prompt": "Hi."}}),
            (f"{stack.own}/v1/completions", prompt),
            (f"{stack.triton}/v2/models/tensorrt_llm/generate_stream", {}),
        ):
            assert_refused(kept.post(url, json=body))
        assert_refused(httpx.get(f"{stack.own}/health"))
        assert_refused(httpx.get(f"{stack.triton}/v2/health/ready"))
        assert httpx.get(f"{stack.triton}/v2/health/live").status_code == 200
        assert httpx.get(f"{stack.own}/metrics").status_code == 200
        load.check()
    assert stack.finish()[0] == 0
    wait_until(lambda: not processes_of(stack.work_dir))


@pytest.mark.full
@pytest.mark.parametrize("victim", [ENGINE, "tritonserver"])
def test_an_engine_that_dies_during_a_drain_costs_no_stream(
    make_stack: Callable[..., Stack], victim: str
) -> None:
    stack = ready(make_stack(DRAIN_TIMEOUT="600"))
    clients = Clients(stack)
    alone = clients.stream(1, TOKENS)
    before = arrived(stack)
    with ThreadPoolExecutor(6) as pool, held(stack):
        answers = [pool.submit(clients.run, number, TOKENS) for number in range(6)]
        until_arrived(stack, before + len(answers))
        clients.until_flowing(answers, 4)
        assert stack.process is not None
        stack.process.send_signal(signal.SIGTERM)
        wait_until(lambda: stack.health() == "UNHEALTHY")
        time.sleep(0.3)
        (pid,) = pids_of(stack, victim)
        os.kill(pid, signal.SIGKILL)
        found = [answer.result(120) for answer in answers]
    assert {told.text for told in found} == {alone.text}
    assert stack.finish()[0] == 0


@pytest.mark.full
def test_triton_alone_drains_too(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack("triton only", DRAIN_TIMEOUT="600")
    wait_until(lambda: "ready in" in stack.output)
    flowing = threading.Event()
    alone = generate_stream(stack, TOKENS, flowing)
    with ThreadPoolExecutor(1) as pool, held(stack):
        flowing.clear()
        running = pool.submit(generate_stream, stack, TOKENS, flowing)
        assert flowing.wait(60)
        assert stack.process is not None
        stack.process.send_signal(signal.SIGTERM)
        url = f"{stack.triton}/v2/health/ready"
        wait_until(lambda: httpx.get(url).status_code == 503)
        assert_refused(httpx.get(url))
        assert running.result(60) == alone
    assert stack.finish()[0] == 0
    wait_until(lambda: not processes_of(stack.work_dir))


@pytest.mark.full
@pytest.mark.parametrize("way", ["cog-triton serve", "triton only"])
def test_calls_of_grpc_get_the_seconds_that_triton_exits_in(
    make_stack: Callable[..., Stack], way: str
) -> None:
    stack = make_stack(way)
    wait_until(lambda: "eady in" in stack.output)
    found: queue.Queue[Any] = queue.Queue()
    values = (("text_input", "BYTES", b"Hi"), ("max_tokens", "INT32", 60), ("stream", "BOOL", True))
    inputs = [grpc.InferInput(name, [1, 1], kind) for name, kind, _ in values]
    for each, (_, kind, value) in zip(inputs, values, strict=True):
        each.set_data_from_numpy(np.array([[value]], triton_to_np_dtype(kind)))
    with grpc.InferenceServerClient(f"127.0.0.1:{stack.grpc}") as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        result = found.get(timeout=60)
        assert stack.process is not None
        stack.process.send_signal(signal.SIGTERM)
        while not result.get_response().parameters["triton_final_response"].bool_param:
            result = found.get(timeout=60)
            assert isinstance(result, grpc.InferResult), result
    assert stack.finish()[0] == 0


@pytest.mark.parametrize(
    "how", [full("SIGTERM to serve"), "SIGTERM to an image", full("POST /shutdown")]
)
def test_requests_that_outlast_the_drain_timeout_fail_with_a_code(
    make_stack: Callable[..., Stack], how: str
) -> None:
    way = "cog-triton serve" if how == "SIGTERM to serve" else "image"
    stack = ready(make_stack(way, DRAIN_TIMEOUT="1"))
    with stack.stream("Tell me a long story.", max_tokens=8000, min_tokens=8000) as events:
        next(kind for kind, _ in events if kind == "output")
        if how == "POST /shutdown":
            httpx.post(f"{stack.url}/shutdown")
        else:
            assert stack.process is not None
            stack.process.send_signal(signal.SIGTERM)
        last = json.dumps(list(events)[-1])
    assert "E2105" in last
    assert "DRAIN_TIMEOUT" in last
    assert stack.finish()[0] == 0
    wait_until(lambda: not processes_of(stack.work_dir))


@pytest.mark.full
def test_a_drain_refuses_new_predictions_and_lets_running_ones_end(
    make_stack: Callable[..., Stack],
) -> None:
    """Cog alone would drop a prediction that nobody's connection waits for."""
    stack = ready(make_stack(DRAIN_TIMEOUT="600"))
    running = {"prompt": "Hi.", "max_tokens": 160, "min_tokens": 160}
    with ThreadPoolExecutor(1) as pool, Receiver() as receiver:
        with held(stack):
            before = arrived(stack)
            body = {
                "input": running,
                "webhook": receiver.url,
                "webhook_events_filter": ["completed"],
            }
            headers = {"Prefer": "respond-async"}
            httpx.post(f"{stack.url}/predictions", json=body, headers=headers)
            waiting = pool.submit(lambda: stack.predict(**running))
            until_arrived(stack, before + 2)
            assert stack.process is not None
            stack.process.send_signal(signal.SIGTERM)
            wait_until(lambda: stack.health() == "UNHEALTHY")
            assert "the server is stopping" in stack.predict()["error"]
        assert stack.finish()[0] == 0
    assert [item["status"] for item in receiver.events] == ["succeeded"]
    assert waiting.result()["metrics"]["output_token_count"] == 160


def test_a_second_sigterm_stops_at_once(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(DRAIN_TIMEOUT="600")
    stack.until_ready()  # as it says itself, which is after its health check does
    assert stack.process is not None
    with stack.stream("Tell me a long story.", max_tokens=8000, min_tokens=8000) as events:
        next(kind for kind, _ in events if kind == "output")
        stack.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "once more stops at once" in stack.output)
        pids = list(processes_of(stack.work_dir))
        assert shared_memory(pids)
        assert stack.finish(signal.SIGTERM)[0] == 0
    assert processes_of(stack.work_dir) == {}
    assert shared_memory(pids) == []
