"""Clients of all kinds whose generations are to outlive engines, and what they were told."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
from stack import Stack, sse, wait_until

PATIENCE_S = 180
ENGINE = "backend.engine_process"
MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "40", "TRITON_MAX_RESTARTS": "50"}


class Told(NamedTuple):
    """What a client was told: its text, finish reason, and usage where there is one."""

    text: str
    finish: str | None
    tokens: int | None


class Clients:
    """Clients of all kinds; `flowing` are those that have got text, `comments` SSE comments."""

    def __init__(self, stack: Any) -> None:
        """`stack` has a `url` and its `own`: of Cog's API and of the OpenAI API."""
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


def metric(stack: Stack, name: str) -> float:
    """The sum over all labels of a metric."""
    text = httpx.get(f"{stack.own}/metrics", timeout=30).text
    lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.split()[-1]) for line in lines)


def arrived(stack: Stack) -> float:
    """How many requests run or have ended."""
    return sum(metric(stack, f"cog_triton_requests_{name}") for name in ("running", "total"))


def until_arrived(stack: Stack, count: float) -> None:
    """Wait until so many requests run or have ended: later ones meet a restart, or a stop."""
    wait_until(lambda: arrived(stack) >= count, PATIENCE_S)


def only_the_killer_ends(stack: Stack, streams: int, told: Told, flowing: int) -> None:
    """Send a request that kills engines once `flowing` of `streams` others get text.

    It ends with E2108, and each of the others is `told` what it is told without it.
    """
    clients = Clients(stack)
    with ThreadPoolExecutor(streams + 1) as pool:
        answers = [pool.submit(clients.run, n, told.tokens or 0) for n in range(streams)]
        until_arrived(stack, streams)
        clients.until_flowing(answers, flowing)
        poison = {"prompt": "Die of this.", "max_tokens": 50, "inject": "crash"}
        ended = pool.submit(
            httpx.post, f"{stack.url}/predictions", json={"input": poison}, timeout=PATIENCE_S
        )
        body = ended.result(PATIENCE_S).json()
        assert body["error"].startswith("E2108 FatalRequest: "), body
        assert [answer.result(PATIENCE_S) for answer in answers] == [told] * streams
