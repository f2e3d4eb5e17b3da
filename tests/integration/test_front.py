"""The front before the real Cog and Triton: what it keeps from them, and how it ends."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import REPOSITORY, Stack, pid_of, processes_of, sse, text_of, wait_until

from cog_triton.system.process_state import process_state

pytestmark = pytest.mark.integration

IMAGE = [sys.executable, "-m", "cog_triton.serve"]
MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "40"}
IN_COG = {"COG_PREDICT_TYPE_STUB": "predict.py:Predictor"}
STOPS = [signal.SIGKILL, signal.SIGSTOP]
ASK = {"input": {"prompt": "Hi.", "max_tokens": 2}}
DEEP = b"[" * 200_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(
        tmp_path_factory.mktemp("front") / "work", None, **MOCK, COG_TRITON_API_KEY="secret"
    )
    with stack.served():
        yield stack


def client(**headers: str) -> httpx.Client:
    return httpx.Client(headers={"authorization": "bearer secret", **headers}, timeout=30)


def start_times(stack: Stack) -> dict[int, str]:
    """Every process and when it started: a restart shows, whatever was answered."""
    return {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        for pid in processes_of(stack.work_dir)
    }


def those_with(port: int) -> set[int]:
    """Processes that have the socket which listens on a port."""
    (inode,) = (
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    )
    found = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it was closed just now
            if str(entry.readlink()) == f"socket:[{inode}]":
                found.add(int(entry.parts[2]))
    return found


@pytest.mark.parametrize("way", ["cog-triton serve", "image", "builder"])
def test_parent_and_server_alone_have_the_public_sockets(
    new_stack: Callable[..., Stack], way: str
) -> None:
    stack = new_stack(**MOCK, **IN_COG)
    public = [stack.port, stack.http, stack.metrics, stack.openai]
    if way != "cog-triton serve":
        stack.command = IMAGE if way == "image" else [*IMAGE, "--cog-only"]
        stack.cwd = REPOSITORY / ("mock_cog_triton" if way == "image" else "builder")
    stack.start()
    assert stack.process is not None
    wait_until(lambda: stack.health() == "READY")
    server = pid_of(stack, "cog_triton.front.server")
    for port in public[:1] if way == "builder" else public:
        assert those_with(port) == {stack.process.pid, server}
    if way == "builder":
        for port in public[1:]:
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{port}/")
        answer = httpx.post(f"{stack.url}/predictions", json={"input": {"config": "nonsense: 1"}})
        assert (answer.json()["status"], "E1300" in answer.text) == ("failed", True)
    private = Path(f"/proc/{pid_of(stack, 'cog.server.http')}/environ").read_text()
    (port,) = (word[5:] for word in private.split("\0") if word.startswith("PORT="))
    assert those_with(int(port)) == {pid_of(stack, "cog.server.http")}
    assert stack.finish(signal.SIGTERM)[0] == 0
    wait_until(lambda: not processes_of(stack.work_dir))


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


@pytest.mark.parametrize(
    "body",
    [DEEP, b'{"a":' * 200_000, b'{"inputs":[],"outputs":[{"name":"OUTPUT","parameters":'
     b'{"classification":2147483647}}]}'],
)  # fmt: skip
def test_no_request_to_tritons_port_ends_a_process(served: Stack, body: bytes) -> None:
    before = start_times(served)
    with client() as http:
        for path in (
            "/v2/models/tensorrt_llm/generate",
            "/v2/models/tensorrt_llm/infer",
            "/v2/models/postprocessing/infer",
            "/v2/repository/index",
            "/v2/logging",
            "/v2/trace/setting",
            "/v2/systemsharedmemory/region/evil/register",
        ):
            answer = http.post(f"{served.triton}{path}", content=body)
            assert answer.status_code in (200, 400, 404), (path, answer.text)
        assert text_of(http.post(f"{served.url}/predictions", json=ASK).json())
    assert start_times(served).items() >= before.items()


def test_a_million_chunks_end_no_process(served: Stack) -> None:
    before = start_times(served)
    head = b"POST /v2/models/tensorrt_llm/generate HTTP/1.1\r\nhost: localhost\r\n"
    head += b"authorization: Bearer secret\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.http), timeout=60) as sock:
        sock.sendall(head + b"1\r\n \r\n" * 1_000_000 + b"2\r\n{}\r\n0\r\n\r\n")
        assert b"HTTP/1.1 400" in sock.recv(100)
    assert start_times(served).items() >= before.items()


def test_the_key_is_the_servers_alone(served: Stack) -> None:
    """The corpus has who may pass."""
    for word in ("cog.server.http", "_run_worker", "/tritonserver ", "engine_process", "_stub "):
        environment = Path(f"/proc/{pid_of(served, word)}/environ")
        assert b"secret" not in environment.read_bytes()


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
        *product(["serve"], ["front.server", "cog.server.http", "_run_worker"], STOPS),
        ("image", "front.server", signal.SIGKILL),
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


def test_a_thousand_idle_connections_keep_nobody_out(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(**MOCK, MAX_CONNECTIONS="100")
    stack.start()
    stack.until_ready()
    before = start_times(stack)
    idle = []
    for number in range(1000):
        port = (stack.port, stack.http, stack.openai, stack.metrics)[number % 4]
        idle.append(socket.create_connection(("127.0.0.1", port)))
        if number % 2:
            idle[-1].sendall(b"GET / HT")
    assert stack.health() == "READY"
    assert text_of(stack.predict("Hi.", max_tokens=2))
    assert httpx.get(f"{stack.triton}/v2/health/ready").status_code == 200
    for sock in idle:
        sock.close()
    assert start_times(stack).items() >= before.items()


def test_a_public_port_in_use_is_a_coded_error(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(**MOCK, **IN_COG)
    stack.command = IMAGE
    stack.cwd = REPOSITORY / "runner"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", stack.http))
        taken.listen()
        stack.start()
        code, output = stack.finish()
    assert code == 1
    assert f"E1005 InvalidArgument: TRITON_HTTP_PORT={stack.http}: cannot listen" in output
    assert processes_of(stack.work_dir) == {}


def test_health_is_answered_beside_all_the_predictions_that_cog_takes(
    new_stack: Callable[..., Stack],
) -> None:
    """Of more than 511, one thread each, Cog's worker would have none left for a health check."""
    stack = new_stack(
        **{**MOCK, "MOCK_TPS": "1"},
        **IN_COG,
        MOCK_MAX_BATCH_SIZE="600",
        COG_MAX_CONCURRENCY="1536",
        MAX_QUEUE="0",
    )
    stack.command = IMAGE
    stack.cwd = REPOSITORY / "mock_cog_triton"
    stack.start()
    wait_until(lambda: stack.health() == "READY")
    body = json.dumps({"input": {"prompt": "Hi.", "max_tokens": 400}})
    ask = (
        f"POST /predictions HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    with ExitStack() as streams:
        heads = []
        for _ in range(520):
            sock = streams.enter_context(socket.create_connection(("127.0.0.1", stack.port), 30))
            sock.sendall(ask.encode())
            heads.append(sock.recv(12))
        assert stack.health() in ("READY", "BUSY")
        assert heads.count(b"HTTP/1.1 200") == 500
        assert heads.count(b"HTTP/1.1 503") == 20
