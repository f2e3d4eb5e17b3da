"""The front door before the real Cog and Triton: what it keeps from them, and how it ends."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import REPOSITORY, Stack, processes_of, text_of, wait_until

pytestmark = pytest.mark.integration

MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "40"}
IN_COG = {"COG_PREDICT_TYPE_STUB": "predict.py:Predictor"}
JSON = {"content-type": "application/json"}
ASK = {"input": {"prompt": "Hi.", "max_tokens": 2}}
DEEP = b"[" * 200_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(
        tmp_path_factory.mktemp("door") / "work", None, **MOCK, COG_TRITON_API_KEY="secret"
    )
    with stack.served():
        yield stack


def client(**headers: str) -> httpx.Client:
    return httpx.Client(headers={"authorization": "bearer secret", **headers}, timeout=30)


def pids_of(stack: Stack, *words: str) -> dict[str, int]:
    # The first of them: one that a process has just forked still has its command line.
    found = dict(sorted(processes_of(stack.work_dir).items(), reverse=True))
    return {
        word: pid
        for word in words
        for pid, line in found.items()
        if word in line and "reaper.py" not in line
    }


def start_times(stack: Stack) -> dict[int, str]:
    """Every process and when it started: a restart shows, whatever was answered."""
    return {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        for pid in processes_of(stack.work_dir)
    }


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports that a process listens on, IPv4 and mapped."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed just now
            target = str(entry.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                packed = bytes.fromhex(address[-8:])[::-1]
                found.add((socket.inet_ntoa(packed), int(port, 16)))
    return found


def test_only_the_door_has_public_ports(served: Stack) -> None:
    behind = ("cog_triton.serving.server", "cog.server.http", "_run_worker", "/tritonserver ")
    pids = pids_of(served, "cog_triton.door", *behind)
    assert len(pids) == 5
    public = {served.port, served.http, served.metrics, served.openai}
    found = {port for _, port in listening(pids.pop("cog_triton.door"))}
    assert found > public
    assert len(found - public) == 1  # where coglet posts webhooks
    for pid in pids.values():
        for address, port in listening(pid):
            assert address == "127.0.0.1"
            assert port not in public


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


def test_classes_of_text_are_refused_and_end_no_process(served: Stack) -> None:
    """Triton 24.10 dies of them, whatever their number."""
    before = start_times(served)
    inputs = [
        {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1, 3], "data": [5, 6, 7]},
        {"name": "SEQUENCE_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [3]},
    ]
    with client() as http:
        url = f"{served.triton}/v2/models/postprocessing/infer"
        assert "OUTPUT" in http.post(url, json={"inputs": inputs}).text
        for classes in (1, 3, 0, True, "1"):
            outputs = [{"name": "OUTPUT", "parameters": {"classification": classes}}]
            answer = http.post(url, json={"inputs": inputs, "outputs": outputs})
            assert answer.status_code == 400
            assert answer.json()["error"] == (
                "E1005 InvalidArgument: parameters of OUTPUT: classification: not allowed;"
                " allowed: binary_data"
            )
    assert start_times(served).items() >= before.items()


def test_a_million_chunks_end_no_process(served: Stack) -> None:
    before = start_times(served)
    head = b"POST /v2/models/tensorrt_llm/generate HTTP/1.1\r\nhost: localhost\r\n"
    head += b"authorization: Bearer secret\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.http), timeout=60) as sock:
        sock.sendall(head + b"1\r\n \r\n" * 1_000_000 + b"2\r\n{}\r\n0\r\n\r\n")
        assert b"HTTP/1.1 400" in sock.recv(100)
    assert start_times(served).items() >= before.items()


def test_the_key_guards_every_port(served: Stack) -> None:
    guarded = [
        ("POST", f"{served.url}/predictions"),
        ("GET", f"{served.url}/openapi.json"),
        ("GET", f"{served.own}/v1/models"),
        ("GET", f"{served.own}/metrics"),
        ("GET", f"{served.triton}/v2/models/stats"),
        ("POST", f"{served.triton}/v2/models/tensorrt_llm/generate"),
        ("GET", f"http://127.0.0.1:{served.metrics}/metrics"),
    ]
    for method, url in guarded:
        answer = httpx.request(method, url, json={} if method == "POST" else None)
        assert (answer.status_code, "E1007" in answer.text) == (401, True), url
    for url in (
        f"{served.url}/health-check",
        f"{served.own}/health",
        f"{served.triton}/v2/health/ready",
    ):
        assert httpx.get(url).status_code == 200
    with client() as http:
        assert http.get(f"{served.own}/v1/models").status_code == 200
        assert "nv_inference" in http.get(f"http://127.0.0.1:{served.metrics}/metrics").text
    environment = Path(f"/proc/{pids_of(served, '/tritonserver ')['/tritonserver ']}/environ")
    assert b"secret" not in environment.read_bytes()


@pytest.mark.parametrize("victim", ["cog_triton.serving.server", "_run_worker"])
def test_a_dead_process_is_a_coded_end_of_every_answer(
    new_stack: Callable[..., Stack], victim: str
) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    stack.until_ready()
    ask = {"input": {"prompt": "Hi.", "max_tokens": 2000}}
    chat = {"model": "mock", "prompt": "Hi.", "max_tokens": 2000, "stream": True}
    asked: list[tuple[str, dict[str, Any], str]] = [
        (f"{stack.url}/predictions", ask, "application/json"),
        (f"{stack.url}/predictions", ask, "text/event-stream"),
        (f"{stack.own}/v1/completions", chat, "text/event-stream"),
    ]
    statuses = [0, 0, 0]
    texts = ["", "", ""]

    def post(number: int) -> None:
        url, body, accept = asked[number]
        headers = {"accept": accept}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            statuses[number] = answer.status_code
            for text in answer.iter_text():
                texts[number] += text

    asking = [threading.Thread(target=post, args=(number,)) for number in range(len(asked))]
    for thread in asking:
        thread.start()
    wait_until(lambda: stack.engine_requests() == 3 and "event: output" in texts[1])
    os.kill(pids_of(stack, victim)[victim], signal.SIGKILL)
    asking[1].join()
    if victim == "_run_worker":  # the door lasts until `serve` gives up
        later = httpx.post(f"{stack.url}/predictions", json=ASK)
        assert (later.status_code, "E2105" in later.text) == (503, True)
    for thread in asking:
        thread.join()
    # Cog outlives the server long enough for an answer of its own to what was asked of it.
    assert statuses[0] == 503 or (statuses[0] == 200 and victim != "_run_worker")
    assert "E2105" in texts[0]
    events = texts[1].strip().split("\n\n")
    assert events[-1].startswith('event: completed\ndata: {"error":"E2105 TritonUnavailable: ')
    assert json.loads(events[-1].partition("data: ")[2])["output"]
    last = json.loads(texts[2].strip().rpartition("data: ")[2])
    assert last["error"]["code"] == "E2105"
    code, output = stack.finish()
    assert code == 1
    assert "E2105" in output


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


def test_a_builder_has_cogs_port_alone(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(**IN_COG)
    stack.command = [sys.executable, "-m", "cog_triton.door", "--cog-only"]
    stack.cwd = REPOSITORY / "builder"
    stack.start()
    wait_until(lambda: stack.health() == "READY")
    found = {port for _, port in listening(pids_of(stack, "cog_triton.door")["cog_triton.door"])}
    assert stack.port in found
    assert len(found) == 2  # and where coglet posts webhooks
    assert not found & {stack.http, stack.metrics, stack.openai}
    answer = httpx.post(f"{stack.url}/predictions", json={"input": {"config": "nonsense: 1"}})
    assert answer.json()["status"] == "failed"
    assert "E1300" in answer.text
    assert stack.finish(signal.SIGTERM)[0] == 0


def test_a_public_port_in_use_ends_the_door_with_a_code(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(**MOCK, **IN_COG)
    stack.command = [sys.executable, "-m", "cog_triton.door"]
    stack.cwd = REPOSITORY / "runner"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", stack.http))
        taken.listen()
        stack.start()
        code, output = stack.finish()
    assert code == 1
    assert f"E1005 InvalidArgument: TRITON_HTTP_PORT={stack.http}: cannot listen" in output
    assert processes_of(stack.work_dir) == {}


def test_the_death_of_the_door_ends_the_server_with_a_code(
    new_stack: Callable[..., Stack],
) -> None:
    stack = new_stack(**MOCK)
    stack.start()
    stack.until_ready()
    with stack.stream("Hi.", max_tokens=400) as events:
        next(kind for kind, _ in events if kind == "output")
        os.kill(pids_of(stack, "cog_triton.door")["cog_triton.door"], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            json.dumps(list(events))
    code, output = stack.finish()
    assert code == 1
    assert "E2105" in output
    wait_until(lambda: not processes_of(stack.work_dir))


def test_a_door_that_nobody_watches_ends_when_cog_hangs(new_stack: Callable[..., Stack]) -> None:
    """As images start it."""
    stack = new_stack(**MOCK, **IN_COG, COG_PROBE_TIMEOUT="10")
    stack.command = [sys.executable, "-m", "cog_triton.door"]
    stack.cwd = REPOSITORY / "mock_cog_triton"
    stack.start()
    worker = wait_until(lambda: pids_of(stack, "_run_worker").get("_run_worker"))
    wait_until(lambda: stack.health() == "READY")
    os.kill(worker, signal.SIGSTOP)  # perhaps before the door itself has read that it is ready
    code, output = stack.finish()
    assert code != 0
    assert "E2105 TritonUnavailable: Cog's worker" in output
    wait_until(lambda: not processes_of(stack.work_dir))


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
    stack.command = [sys.executable, "-m", "cog_triton.door"]
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
