"""A lost process of the server is replaced, or ends it, and each client gets an end."""

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from layers import full
from stack import REPOSITORY, Stack, pid_of, processes_of, sse, wait_until

from cog_triton.system.process_state import process_state

pytestmark = pytest.mark.integration

IMAGE = [sys.executable, "-m", "cog_triton.serve"]
MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "40"}
IN_COG = {"COG_PREDICT_TYPE_STUB": "predict.py:Predictor"}
STOPS = [signal.SIGKILL, signal.SIGSTOP]
ASK = {"input": {"prompt": "Hi.", "max_tokens": 2}}
DEEP = b"[" * 200_000


class Asked:
    """A prediction, a streamed one and a streamed completion, which run."""

    def __init__(self, stack: Stack, pool: ThreadPoolExecutor, tokens: int) -> None:
        prediction = {"input": {"prompt": "Hi.", "max_tokens": tokens}}
        completion = {"model": "mock", "prompt": "Hi.", "max_tokens": tokens, "stream": True}
        self.texts = ["", "", ""]
        asked: list[tuple[str, dict[str, Any], str]] = [
            (f"{stack.url}/predictions", prediction, "application/json"),
            (f"{stack.url}/predictions", prediction, "text/event-stream"),
            (f"{stack.own}/v1/completions", completion, "text/event-stream"),
        ]
        self._answers = [pool.submit(self._post, *each) for each in enumerate(asked)]
        wait_until(lambda: stack.engine_requests() == 3 and "event: output" in self.texts[1])

    def _post(self, number: int, asked: tuple[str, dict[str, Any], str]) -> int:
        """The answer's status; 0 of one that was cut."""
        url, body, accept = asked
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", url, json=body, headers={"accept": accept}, timeout=60) as answer,
        ):
            for text in answer.iter_text():
                self.texts[number] += text
            return answer.status_code
        return 0

    def statuses(self) -> list[int]:
        return [answer.result() for answer in self._answers]

    def require_failed(self, of_all: bool) -> None:
        """Predictions have ended with E2105; `of_all` the completion, too, which else is whole."""
        assert self.statuses() in ([503, 200, 200], [200, 200, 200])
        assert json.loads(self.texts[0])["error"].startswith("E2105 TritonUnavailable: ")
        kind, last = list(sse(iter(self.texts[1].splitlines())))[-1]
        assert (kind, last["status"]) == ("completed", "failed")
        assert last["error"].startswith("E2105 TritonUnavailable: ")
        end = self.texts[2].strip().rpartition("data: ")[2]
        if of_all:
            assert json.loads(end)["error"]["code"] == "E2105"
        else:
            assert end == "[DONE]"


@pytest.mark.parametrize(
    ("way", "victim", "sent"),
    [
        ("serve", "front.server", signal.SIGKILL),
        ("serve", "cog.server.http", signal.SIGKILL),
        ("serve", "_run_worker", signal.SIGSTOP),
        full("image", "front.server", signal.SIGKILL),
    ],
)
def test_a_lost_process_is_replaced_and_all_else_stays(
    new_stack: Callable[..., Stack], victim: str, sent: signal.Signals, way: str
) -> None:
    stack = new_stack(**MOCK, **IN_COG, COG_MAX_CONCURRENCY="8")
    if way == "image":
        stack.command, stack.cwd = IMAGE, REPOSITORY / "mock_cog_triton"
    stack.start()
    wait_until(lambda: stack.health() == "READY")
    words = ("front.server", "engine_process", "/tritonserver ", "cog.server.http")
    before = {word: pid_of(stack, word) for word in words}
    with ThreadPoolExecutor() as pool:
        asked = Asked(stack, pool, 200)
        os.kill(pid_of(stack, victim), sent)
        if victim == "front.server":
            assert asked.statuses() == [0, 0, 0]
            chat = {"model": "mock", "prompt": "Hi.", "max_tokens": 3}
            answer = httpx.post(f"{stack.own}/v1/completions", json=chat, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 3, answer.text
        else:
            asked.require_failed(of_all=False)
    wait_until(lambda: stack.health() == "READY" and not pids_of_stopped(stack))
    wait_until(lambda: stack.predict("Hi.", max_tokens=3).get("status") == "succeeded")
    lost = victim if victim == "front.server" else "cog.server.http"
    same = {word: pid_of(stack, word) == pid for word, pid in before.items()}
    assert same == {word: word != lost for word in before}
    assert "it is started again" in stack.output
    assert stack.finish(signal.SIGTERM)[0] == 0
    assert processes_of(stack.work_dir) == {}


def pids_of_stopped(stack: Stack) -> list[int]:
    return [pid for pid in processes_of(stack.work_dir) if process_state(pid) == "T"]


@pytest.mark.full
def test_the_death_of_another_rank_ends_every_request_and_the_server(
    new_stack: Callable[..., Stack],
) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    stack.until_ready()
    with ThreadPoolExecutor() as pool:
        asked = Asked(stack, pool, 2000)
        os.kill(pid_of(stack, "-m cog_triton serve"), signal.SIGUSR1)
        code, output = stack.finish()
        asked.require_failed(of_all=True)
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
