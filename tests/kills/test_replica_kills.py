"""Several engines of one model behind one front end: one of them is killed under streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
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
from stack import Stack, pids_of, wait_until

pytestmark = pytest.mark.integration

REPLICAS = {**MOCK, "ENGINE_REPLICAS": "2"}


def until_both_serve(stack: Stack) -> None:
    """Wait until two engines serve; READY all the while."""

    def two() -> bool:
        assert stack.health() == "READY"
        return metric(stack, "cog_triton_engines") == 2 and len(pids_of(stack, ENGINE)) == 2

    wait_until(two, PATIENCE_S)


@pytest.mark.full
def test_no_stream_is_lost_with_one_of_two_engines_nor_is_readiness(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    """Either of them is killed, the second one while the first one's successor has requests."""
    stack = make_stack(**REPLICAS)
    clients, streams, tokens = Clients(stack), 24, 600
    assert stack.engine_requests("max") == 2 * 2 * 256, "of two models, two engines each"
    until_both_serve(stack)
    (triton,) = pids_of(stack, "bin/tritonserver")
    victims, resumed, arrived = pids_of(stack, ENGINE), 0.0, 0
    for victim in victims:
        with ThreadPoolExecutor(streams) as pool:
            answers = [pool.submit(clients.run, n, tokens) for n in range(streams)]
            arrived += streams
            until_arrived(stack, arrived)
            clients.until_flowing(answers)
            os.kill(victim, signal.SIGKILL)
            told = [answer.result(PATIENCE_S) for answer in answers]
        assert told == [Told(says(tokens), "length", tokens)] * streams
        before, resumed = resumed, metric(stack, "cog_triton_resumed_total")
        assert 0 < resumed - before < streams, "one had all of them"
        until_both_serve(stack)
    assert not set(victims) & set(pids_of(stack, ENGINE))
    assert pids_of(stack, "bin/tritonserver") == [triton]
    assert metric(stack, "cog_triton_engine_restarts_total") == 2
    wait_until(lambda: stack.engine_requests() == 0)


@pytest.mark.full
def test_all_wait_where_the_last_engine_has_died_and_engines_outlive_triton(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    stack = make_stack(**REPLICAS)
    clients, streams, tokens = Clients(stack), 12, 300
    with ThreadPoolExecutor(streams) as pool:
        answers = [pool.submit(clients.run, n, tokens) for n in range(streams)]
        until_arrived(stack, streams)
        clients.until_flowing(answers)
        for victim in pids_of(stack, ENGINE):
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: stack.health() == "UNHEALTHY", PATIENCE_S)
        wait_until(lambda: stack.health() == "READY", PATIENCE_S)
        until_both_serve(stack)
        clients.until_flowing(answers, 8)
        survivors = pids_of(stack, ENGINE)
        os.kill(pids_of(stack, "bin/tritonserver")[0], signal.SIGKILL)
        wait_until(lambda: stack.health() == "UNHEALTHY", PATIENCE_S)
        told = [answer.result(PATIENCE_S) for answer in answers]
    assert told == [Told(says(tokens), "length", tokens)] * streams
    assert pids_of(stack, ENGINE) == survivors
    wait_until(lambda: stack.health() == "READY", PATIENCE_S)
    wait_until(lambda: stack.engine_requests() == 0)


@pytest.mark.full
def test_requests_that_kill_engines_are_caught_and_others_go_on(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    stack = make_stack(**{**REPLICAS, "TRITON_MAX_RESTARTS": "2"})
    only_the_killer_ends(stack, 8, Told(says(250), "length", 250), flowing=4)
    wait_until(lambda: stack.health() == "READY", PATIENCE_S)
    until_both_serve(stack)


def test_clients_of_triton_use_the_engine_that_is_left(
    make_stack: Callable[..., Stack],
) -> None:
    """Triton's own model has a choice of its own."""
    stack = make_stack(**REPLICAS)
    values = {"text_input": "Say it.", "max_tokens": 5}
    url = f"{stack.triton}/v2/models/ensemble/generate"
    texts = {httpx.post(url, json=values).json()["text_output"] for _ in range(4)}
    assert len(texts) == 1
    until_both_serve(stack)
    os.kill(pids_of(stack, ENGINE)[0], signal.SIGKILL)
    wait_until(lambda: metric(stack, "cog_triton_engine_restarts_total") == 1, PATIENCE_S)
    again = [httpx.post(url, json=values) for _ in range(4)]
    assert {answer.json()["text_output"] for answer in again} == texts


@pytest.mark.full
def test_what_does_not_go_together_is_refused_at_start(make_stack: Callable[..., Stack]) -> None:
    said = "E1005 InvalidArgument: ENGINE_REPLICAS=2: must be 1 with SPARE_ENGINE"
    with pytest.raises(AssertionError, match=said):
        make_stack(**REPLICAS, SPARE_ENGINE="1")
