"""Streams of /v1/responses that break off: read on from where they broke, or shown as failed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import pytest
from layers import full
from resume_clients import ENGINE, MOCK
from stack import Stack, pid_of, pids_of, sse, wait_until

pytestmark = pytest.mark.integration

TOKENS, LONG = 120, 1500
SERVER = "cog_triton.front.server"
# A client of many streams, each of which tells when it has read half of its text, and reads on.
CLIENT = """
import json, os, sys, threading
import httpx

def run(number):
    body = {"model": "any", "input": f"Tell me {number} stories.", "temperature": 0}
    body |= {"max_output_tokens": int(sys.argv[4]), "stream": True}
    text, name, told = "", None, False
    with httpx.stream("POST", sys.argv[1] + "/v1/responses", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            name = name or event["response"]["id"]
            text += event.get("delta", "")
            if len(text) >= int(sys.argv[3]) and not told:
                told = True
                line = json.dumps([name, event["sequence_number"], text]) + "\\n"
                os.write(1, line.encode())  # at once, among threads

for number in range(int(sys.argv[2])):
    threading.Thread(target=run, args=(number,)).start()
"""


class Half(NamedTuple):
    """What a client has got of a response: events up to a number, and their text."""

    name: str
    number: int
    text: str


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("taken_up"))


@contextmanager
def client(
    stack: Stack, count: int, half: int, tokens: int
) -> Iterator[tuple[subprocess.Popen[bytes], list[Half]]]:
    """A process whose every stream is read to `half` of its characters."""
    command = [sys.executable, "-c", CLIENT, stack.own, *map(str, (count, half, tokens))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=None) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(count)]
            yield process, [Half(*json.loads(line)) for line in lines]
        finally:
            process.kill()


def taken_up(stack: Stack, half: Half) -> tuple[str, str]:
    """The whole text of a response whose first half is known, and its last event."""
    url = f"{stack.own}/v1/responses/{half.name}"
    query = {"stream": "true", "starting_after": str(half.number)}
    text, number, kind = half.text, half.number, ""
    with httpx.stream("GET", url, params=query, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for kind, event in sse(answer.iter_lines()):  # noqa: B007 - the last one
            assert event["sequence_number"] == number + 1
            number += 1
            text += event.get("delta", "")
    return text, kind


def all_taken_up(stack: Stack, halves: list[Half]) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(20) as pool:
        return list(pool.map(lambda half: taken_up(stack, half), halves))


@pytest.mark.parametrize(
    "victims",
    [
        full(("client",)),
        ("engine",),
        full(("client", "engine")),
    ],
    ids="+".join,
)
def test_a_text_is_whole_after_client_or_engine_are_killed(
    make_stack: Callable[..., Stack],
    says: Callable[[int], str],
    count: int,
    victims: tuple[str, ...],
) -> None:
    stack = make_stack(**MOCK, MAX_CONCURRENCY=str(max(count, 64)))
    with client(stack, count, len(says(TOKENS)) // 2, TOKENS) as (process, halves):
        if "client" in victims:
            process.kill()
            process.wait()
        if "engine" in victims:
            (engine,) = pids_of(stack, ENGINE)
            os.kill(engine, signal.SIGKILL)
        told = all_taken_up(stack, halves)
        assert told == [(says(TOKENS), "response.incomplete")] * count
    for half in halves:
        answer = httpx.get(f"{stack.own}/v1/responses/{half.name}").json()
        assert answer["output"][0]["content"][0]["text"] == says(TOKENS)
        assert answer["usage"]["output_tokens"] == TOKENS


@pytest.mark.full
def test_what_a_killed_server_made_is_told_as_failed_after_the_restart(
    make_stack: Callable[..., Stack], says: Callable[[int], str], count: int
) -> None:
    stack = make_stack(**MOCK, MAX_CONCURRENCY=str(max(count, 64)))
    with client(stack, count, len(says(TOKENS)) // 2, LONG) as (_, halves):
        killed = pid_of(stack, SERVER)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: killed not in pids_of(stack, SERVER))
    for half in halves:
        found = httpx.get(f"{stack.own}/v1/responses/{half.name}").json()
        assert found["status"] == "failed"
        assert found["error"]["message"].startswith("E2105 TritonUnavailable: ")
        answer = httpx.get(f"{stack.own}/v1/responses/{half.name}?stream=true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "E1005")
