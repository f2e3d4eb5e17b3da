"""Generations outlive their engine: every process of Triton is killed under streams."""

import os
import queue
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from resume_clients import (
    ENGINE,
    MOCK,
    PATIENCE_S,
    Clients,
    Told,
    metric,
    only_the_killer_ends,
    until_arrived,
)
from stack import Stack, pids_of, processes_of, wait_until

pytestmark = pytest.mark.integration

STUB, TRITON = "engine_steps/1/model.py", "bin/tritonserver"
VICTIMS = (ENGINE, STUB, TRITON)


def pids(stack: Stack) -> set[int]:
    return set(processes_of(stack.work_dir))


def strike(stack: Stack, victim: str) -> float:
    """Kill a process; the time until the server is READY again.

    Triton outlives its engine's process, and that outlives Triton.
    """
    (pid,) = wait_until(lambda: pids_of(stack, victim), PATIENCE_S)
    survivor = TRITON if victim == ENGINE else ENGINE
    before = pids_of(stack, survivor)
    restarts = metric(stack, "cog_triton_engine_restarts_total")
    os.kill(pid, signal.SIGKILL)
    struck = time.monotonic()
    wait_until(lambda: metric(stack, "cog_triton_engine_restarts_total") > restarts, PATIENCE_S)
    wait_until(lambda: stack.health() == "READY", PATIENCE_S)
    took = time.monotonic() - struck
    assert pids_of(stack, survivor) == before
    assert pids_of(stack, victim) != [pid]
    return took


_NOTES = {"type": "object", "properties": {"notes": {"type": "array", "items": {"type": "string"}}}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": _NOTES}}
CLASSES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 7},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"response_format": _SCHEMA},
)


@pytest.mark.full
def test_every_text_of_openvino_is_that_of_an_undisturbed_run(
    make_stack: Callable[..., Stack], engine_tar: Path
) -> None:
    """Of classes whose tokens are a prompt, and of those that are made again; /v1 alone has guides.

    Three of each, so that each is asked of every API; `make faults` asks a thousand.
    """
    stack = make_stack(engine_tar, TRITON_MAX_RESTARTS="50")
    clients, streams, tokens = Clients(stack), 15, 100

    def ask(number: int) -> Told:
        values = CLASSES[number % len(CLASSES)]
        if "response_format" in values:
            return clients.stream(number, tokens, **values)
        return clients.run(number, tokens, **values)

    with ThreadPoolExecutor(streams) as pool:
        undisturbed = list(pool.map(ask, range(streams)))
        assert len({told.text for told in undisturbed}) > streams // 2
        answers = [pool.submit(ask, number) for number in range(streams)]
        until_arrived(stack, 2 * streams)
        for victim in VICTIMS:
            clients.until_flowing(answers, 5)
            print(f"{victim}: READY after {strike(stack, victim):.1f} s")
        found = [answer.result(PATIENCE_S) for answer in answers]
    assert [n for n in range(streams) if found[n] != undisturbed[n]] == []
    wait_until(lambda: stack.engine_requests() == 0)


@pytest.mark.full
def test_a_request_that_kills_the_engine_ends_alone(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    stack = make_stack(**{**MOCK, "TRITON_MAX_RESTARTS": "2"})
    only_the_killer_ends(stack, 16, Told(says(600), "length", 600), flowing=8)
    again = stack.predict("Die of this.", max_tokens=50, inject="crash")
    assert again["error"].startswith("E2108 FatalRequest: ")
    assert stack.health() == "READY"


@pytest.mark.full
def test_no_stream_is_blamed_for_deaths_while_tritons_api_is_in_use(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    """The only stream in the engine has no token at any of four deaths; two would be its own."""
    waits = {"MOCK_PREFILL_MS": "2000", "TRITON_TIMEOUT": "600"}
    stack = make_stack(**MOCK, **waits)
    body = {"text_input": "Hello.", "max_tokens": 30, "bad_words": "", "stop_words": ""}

    def infer(api: str) -> None:
        if api == "grpc":
            text = grpcclient.InferInput("text_input", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[b"Hello."]], dtype=object))
            size = grpcclient.InferInput("max_tokens", [1, 1], "INT32")
            size.set_data_from_numpy(np.array([[30]], dtype=np.int32))
            ends: queue.Queue[Any] = queue.Queue()
            with grpcclient.InferenceServerClient(f"127.0.0.1:{stack.grpc}") as client:
                client.start_stream(lambda result, error: ends.put(error))
                client.async_stream_infer("ensemble", [text, size])
                assert ends.get(timeout=PATIENCE_S) is not None
            return
        url = f"{stack.triton}/v2/models/ensemble/generate_stream"
        with suppress(httpx.HTTPError):
            httpx.post(url, json=body, timeout=PATIENCE_S)

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(Clients(stack).stream, 1, 40)
        for api in ("http", "grpc", "http", "grpc"):
            other = pool.submit(infer, api)
            wait_until(lambda: stack.engine_requests() == 2, PATIENCE_S)
            strike(stack, TRITON)
            other.result(PATIENCE_S)
        assert answer.result(PATIENCE_S) == Told(says(40), "length", 40)


@pytest.mark.full
def test_clients_that_leave_while_they_wait_leave_nothing_in_the_engine(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    stack = make_stack(**MOCK)
    clients = Clients(stack)
    with ThreadPoolExecutor(6) as pool, stack.stream("Leave.", max_tokens=4000) as events:
        answers = [pool.submit(clients.run, n, 150) for n in range(5)]
        until_arrived(stack, 6)
        clients.until_flowing(answers, 2)
        next(events)
        (pid,) = pids_of(stack, VICTIMS[0])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: stack.health() == "UNHEALTHY")
        events.close()  # type: ignore[attr-defined]
        wait_until(lambda: pids_of(stack, VICTIMS[2]), PATIENCE_S)
        for again in pids_of(stack, VICTIMS[2]):  # killed while they wait
            os.kill(again, signal.SIGKILL)
    told = [answer.result(PATIENCE_S) for answer in answers]
    assert told == [Told(says(150), "length", 150)] * 5
    wait_until(lambda: stack.health() == "READY")
    wait_until(lambda: stack.engine_requests() == 0)
