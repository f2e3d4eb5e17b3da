"""Generations outlive their engine: every process of Triton is killed under streams."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from stack import Stack, processes_of, sse, wait_until

from cog_triton.engines.mock import mock_directory
from cog_triton.text.tokenizer import EngineTokenizer

pytestmark = pytest.mark.integration

ENGINE, STUB, TRITON = "backend.engine_process", "engine_steps/1/model.py", "bin/tritonserver"
VICTIMS = (ENGINE, STUB, TRITON)
PATIENCE_S = 180
NAME = {"SERVED_MODEL_NAME": "any"}
MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "40", "TRITON_MAX_RESTARTS": "50"}


class Told(NamedTuple):
    """What a client was told: its text, finish reason, and usage where there is one."""

    text: str
    finish: str | None
    tokens: int | None


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def make(engine: object = None, **environment: str) -> Stack:
        name = tmp_path / f"work{len(stacks)}"
        stacks.append(Stack(name, None if engine is None else str(engine), **NAME, **environment))
        stacks[-1].start()
        stacks[-1].until_ready()
        return stacks[-1]

    yield make
    for item in stacks:
        item.close()


@pytest.fixture(scope="module")
def says(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """What the mock says in so many tokens."""
    engine = mock_directory.make_engine(tmp_path_factory.mktemp("engines"))
    ids = mock_directory.read_model(engine).output_ids
    tokenizer = EngineTokenizer.load(engine).tokenizer

    def said(count: int) -> str:
        text = str(tokenizer.decode([ids[place % len(ids)] for place in range(count)]))
        return text.rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that is not complete

    return said


def pids_of(stack: Stack, word: str) -> list[int]:
    lines = processes_of(stack.work_dir).items()
    return [pid for pid, line in lines if word in line and "reaper.py" not in line]


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


class Clients:
    """Clients of all kinds; `flowing` are those that have got text, `comments` SSE comments."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.flowing: set[int] = set()
        self.comments: list[str] = []
        self.logs: list[str] = []

    def run(self, number: int, tokens: int, stop: str | None = None, **values: Any) -> Told:
        kind = (self.predict, self.stream, self.whole)[number % 3]
        return kind(number, tokens, stop, **values)

    def until_flowing(self, answers: list[Future[Told]], count: int = 12) -> None:
        """Wait until so many get text; fails as soon as one of `answers` has failed."""
        self.flowing.clear()

        def flow() -> bool:
            for answer in answers:
                if answer.done():
                    answer.result()
            return len(self.flowing) >= count or all(answer.done() for answer in answers)

        wait_until(flow, PATIENCE_S)

    def predict(self, number: int, tokens: int, stop: str | None = None, **values: Any) -> Told:
        body: dict[str, Any] = {"prompt": f"Tell me {number} stories.", "max_tokens": tokens}
        if stop is not None:
            body["stop_sequences"] = stop
        with httpx.stream(
            "POST",
            f"{self.stack.url}/predictions",
            json={"input": {**body, "temperature": 0, "top_p": 0, "top_k": 1, **values}},
            headers={"Accept": "text/event-stream"},
            timeout=PATIENCE_S,
        ) as response:
            texts = []
            for event, data in sse(response.iter_lines()):
                if event == "output":
                    self.flowing.add(number)
                    texts.append(data["chunk"])
        assert data["status"] == "succeeded", data
        self.logs.append(data.get("logs") or "")
        metrics = data["metrics"]
        return Told("".join(texts), metrics["finish_reason"], metrics["output_token_count"])

    def body(self, number: int, tokens: int, stop: str | None, **values: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": f"Tell me {number} stories.", "max_tokens": tokens}
        body |= {"model": "any", "temperature": 0, **values}
        return body if stop is None else {**body, "stop": stop}

    def stream(self, number: int, tokens: int, stop: str | None = None, **values: Any) -> Told:
        body = {**self.body(number, tokens, stop, **values), "stream": True}
        body["stream_options"] = {"include_usage": True}
        text, finish, used = "", None, None
        with httpx.stream(
            "POST", f"{self.stack.own}/v1/completions", json=body, timeout=PATIENCE_S
        ) as response:
            for line in response.iter_lines():
                if line.startswith(":"):
                    self.comments.append(line)
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line[6:])
                assert "error" not in data, data
                for choice in data["choices"]:
                    self.flowing.add(number)
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                if usage := data.get("usage"):
                    used = usage["completion_tokens"]
        return Told(text, finish, used)

    def whole(self, number: int, tokens: int, stop: str | None = None, **values: Any) -> Told:
        body = self.body(number, tokens, stop, **values)
        answer = httpx.post(f"{self.stack.own}/v1/completions", json=body, timeout=PATIENCE_S)
        data = answer.json()
        assert answer.status_code == 200, data
        (choice,) = data["choices"]
        return Told(choice["text"], choice["finish_reason"], data["usage"]["completion_tokens"])


def stop_after(text: str, place: int) -> str:
    """A stop string, which is not in the text before `place`."""
    parts = (text[start : start + 20] for start in range(place, len(text)))
    fits = (part for part in parts if part == part.strip() and "," not in part)
    return next(part for part in fits if text.index(part) >= place)


def metric(stack: Stack, name: str) -> float:
    """The sum over all labels of a metric."""
    text = httpx.get(f"{stack.own}/metrics", timeout=30).text
    lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.split()[-1]) for line in lines)


def until_arrived(stack: Stack, count: int) -> None:
    """Wait until so many requests run or have ended: later ones are refused during a restart."""
    names = ("cog_triton_requests_running", "cog_triton_requests_total")
    wait_until(lambda: sum(metric(stack, name) for name in names) >= count, PATIENCE_S)


def test_no_stream_of_the_mock_is_lost(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    stack = make_stack(**MOCK)
    clients, streams, tokens = Clients(stack), 32, 400
    told = says(tokens)
    part = stop_after(told, len(says(200)))
    cut = told[: told.index(part)]
    with ThreadPoolExecutor(streams) as pool:
        answers = [
            pool.submit(clients.run, n, tokens, part if n % 4 == 0 else None)
            for n in range(streams)
        ]
        until_arrived(stack, streams)
        for victim in VICTIMS:
            clients.until_flowing(answers)
            print(f"{victim}: READY after {strike(stack, victim):.1f} s")
        for number, answer in enumerate(answers):
            got = answer.result(PATIENCE_S)
            if number % 4 == 0:
                assert (got.text, got.finish) == (cut, "stop"), number
            else:
                assert got == Told(told, "length", tokens), number
    assert any("resumed after" in log for log in clients.logs)
    assert metric(stack, "cog_triton_resumed_total") >= streams
    wait_until(lambda: stack.engine_requests() == 0)


def test_no_stream_of_openvino_is_lost_and_greedy_text_is_the_same_but_for_near_ties(
    make_stack: Callable[..., Stack], engine_tar: Path
) -> None:
    """Half of them with a repetition penalty, over prompt and output on both sides of the seam."""
    stack = make_stack(engine_tar, TRITON_MAX_RESTARTS="50")
    clients, streams, tokens = Clients(stack), 32, 120

    def ask(number: int, penalized: bool) -> Told:
        penalty = {"repetition_penalty": 1.2} if penalized else {}
        return clients.run(number, tokens, **penalty)

    with ThreadPoolExecutor(streams) as pool:
        undisturbed = list(pool.map(lambda n: ask(n, n < streams // 2), range(streams)))
        assert ask(0, False) != undisturbed[0]
        answers = [pool.submit(ask, n, n < streams // 2) for n in range(streams)]
        until_arrived(stack, 2 * streams + 1)
        for victim in VICTIMS:
            clients.until_flowing(answers)
            print(f"{victim}: READY after {strike(stack, victim):.1f} s")
        found = [answer.result(PATIENCE_S) for answer in answers]
    different = [(a, b) for a, b in zip(undisturbed, found, strict=True) if a != b]
    # Near ties: of a prompt, a token's logits differ in the last digits from those of a step.
    assert len(different) <= 2, different
    wait_until(lambda: stack.engine_requests() == 0)


def test_a_request_that_kills_the_engine_ends_alone(
    make_stack: Callable[..., Stack], says: Callable[[int], str]
) -> None:
    stack = make_stack(**{**MOCK, "TRITON_MAX_RESTARTS": "2"})
    clients, tokens = Clients(stack), 600
    with ThreadPoolExecutor(17) as pool:
        answers = [pool.submit(clients.run, n, tokens) for n in range(16)]
        until_arrived(stack, 16)
        clients.until_flowing(answers, 8)
        poison = {"prompt": "Die of this.", "max_tokens": 50, "inject": "crash"}
        ended = pool.submit(
            httpx.post, f"{stack.url}/predictions", json={"input": poison}, timeout=PATIENCE_S
        )
        body = ended.result(PATIENCE_S).json()
        assert body["error"].startswith("E2108 FatalRequest: "), body
        assert [answer.result(PATIENCE_S) for answer in answers] == [
            Told(says(tokens), "length", tokens)
        ] * 16
    again = stack.predict("Die of this.", max_tokens=50, inject="crash")
    assert again["error"].startswith("E2108 FatalRequest: ")
    assert stack.health() == "READY"


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


def test_without_resume_a_death_ends_every_stream_with_e2105(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(**MOCK, RESUME="0")
    with stack.stream("Tell me a long story.", max_tokens=4000) as events:
        next(kind for kind, _ in events if kind == "output")
        strike(stack, VICTIMS[0])
        last = list(events)[-1]
    assert "E2105 TritonUnavailable" in json.dumps(last)
