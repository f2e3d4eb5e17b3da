"""The mock engine behind the real Cog and the real Triton: what it says, and how it breaks."""

import asyncio
import ctypes
import errno
import importlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from stack import REPOSITORY, Stack, pid_of, predict, text_of, wait_until

from cog_triton.engines.mock import mock_directory
from cog_triton.text.tokenizer import EngineTokenizer

pytestmark = pytest.mark.integration

FREED_S = 60
# Triton loses responses when some 278 of them wait for its HTTP thread; see docs/mock.md. So no
# test has more than 250 tokens flat out, or a rate at which so many gather in a fifth of a second.


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mock_directory.make_engine(tmp_path_factory.mktemp("engines"))


class Says:
    """What the mock says, which is known beforehand."""

    def __init__(self, engine: Path) -> None:
        self._ids = mock_directory.read_model(engine).output_ids
        self._tokenizer = EngineTokenizer.load(engine)

    def ids(self, count: int) -> list[int]:
        return [self._ids[place % len(self._ids)] for place in range(count)]

    def __call__(self, count: int) -> str:
        return str(self._tokenizer.tokenizer.decode(self.ids(count)))

    def prompt(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


@pytest.fixture(scope="module")
def says(engine: Path) -> Says:
    return Says(engine)


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # No probe of Cog: some tests stop one of its processes for a moment, which a probe would end.
    stack = Stack(tmp_path_factory.mktemp("mock"), None, MOCK_JITTER="0.2", COG_PROBE_PERIOD="3600")
    stack.command += ["--engine", "mock", "--tps", "0"]
    with stack.served():
        yield stack


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Started as the original's is, in its directory; for tests that break it."""
    stack = Stack(
        tmp_path_factory.mktemp("fragile"),
        None,
        COG_PREDICT_TYPE_STUB="predict.py:Predictor",
        COG_MAX_CONCURRENCY="32",
        MOCK_MAX_BATCH_SIZE="16",
        TRITON_TIMEOUT="2",
        RESUME="0",
    )
    stack.command = [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"]
    stack.cwd = REPOSITORY / "mock_cog_triton"
    stack.start()
    try:
        wait_until(lambda: stack.health() == "READY")
        yield stack
    finally:
        stack.close()


def outputs(stack: Stack, **values: Any) -> list[str]:
    """Each event's text."""
    with stack.stream("Hi", **values) as events:
        found = [(kind, data) for kind, data in events]
    assert found[-1][1]["status"] == "succeeded", found[-1]
    return [data["chunk"] for kind, data in found if kind == "output"]


def from_triton(stack: Stack, prompt: list[int], **values: Any) -> Iterator[dict[str, Any]]:
    """Events of Triton's own model, as they arrive."""
    body = {
        "input_ids": prompt,
        "input_lengths": len(prompt),
        "request_output_len": 20,
        "streaming": True,
        **values,
    }
    url = f"{stack.triton}/v2/models/tensorrt_llm/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def ids_of(event: dict[str, Any]) -> list[int]:
    ids = event["output_ids"]
    return ids if isinstance(ids, list) else [ids]


async def answer_to(host: str, port: int, body: dict[str, Any]) -> bytes:
    """A whole HTTP response, over a connection of its own."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    found = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return found


def test_a_burst_of_1024_streams_is_served_by_default(mock: Stack) -> None:
    async def burst() -> list[bytes]:
        body = {"model": "mock", "prompt": "Hi", "max_tokens": 4, "stream": True}
        return await asyncio.gather(
            *(answer_to("127.0.0.1", mock.openai, body) for _ in range(1024))
        )

    answers = asyncio.run(burst())
    assert {answer.split(b"\r\n", 1)[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    assert all(b"data: [DONE]" in answer for answer in answers)


def test_output_repeats_the_passage(mock: Stack, says: Says) -> None:
    prediction = mock.predict("Hi", max_tokens=600, tps=300)
    assert text_of(prediction) == says(600)
    metrics = prediction["metrics"]
    assert (metrics["output_token_count"], metrics["finish_reason"]) == (600, "length")
    assert metrics["input_token_count"] == len(
        says.prompt("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    )


def test_the_request_of_the_original_has_all_that_its_script_reads(mock: Stack, says: Says) -> None:
    values = {"tps": 200, "n_output_tokens": 40, "output_method": "yield", "buffer_size": None}
    answer = predict(mock.url, **values)
    assert text_of(answer) == says(40)
    lines = dict(line.split(": ", 1) for line in answer["logs"].splitlines() if ": " in line)
    assert float(lines["Expected tokens per second"]) == 200
    assert lines["Expected execution time"] == "0.20 seconds"
    assert lines["Expected time to first token"] == "0.01 seconds"  # 0.005 s
    for name in ("execution time", "time to first token"):
        assert float(lines[f"Serverside {name}"].split()[0]) >= 0
    assert 0 < float(lines["Serverside tokens per second"]) < 220
    assert lines["Tokens processed"] == "40"
    metrics = answer["metrics"]
    assert metrics["expected_tokens_per_second"] == 200
    assert metrics["expected_duration"] == pytest.approx(0.2)
    assert metrics["expected_time_to_first_token"] == pytest.approx(0.005)


def test_yield_mode_streams_and_wait_mode_does_not(mock: Stack, says: Says) -> None:
    with mock.stream("Hi", tps=50, n_output_tokens=75) as events:
        live = (data["chunk"] for kind, data in events if kind == "output")
        beginning = list(islice(live, 3))
        assert mock.engine_requests() == 1
        rest = list(live)
    assert "".join(beginning + rest) == says(75)
    assert len(beginning + rest) > 20
    assert outputs(mock, tps=50, n_output_tokens=60, output_method="wait") == [says(60)]


def test_buffer_mode_sends_pieces_of_a_number_of_tokens(mock: Stack, says: Says) -> None:
    pieces = outputs(mock, tps=50, n_output_tokens=50, output_method="buffer", buffer_size=10)
    assert "".join(pieces) == says(50)
    assert 1 < len(pieces) <= 5
    (piece,) = outputs(mock, n_output_tokens=50, output_method="buffer", buffer_size=1000)
    assert piece == says(50)


def test_rates_have_the_requested_ratio(mock: Stack, says: Says) -> None:
    def tokens(rate: float, stop: int) -> int:
        """Tokens until so many have come, or the others are done."""
        count = 0
        for event in from_triton(mock, says.prompt("Hi"), tps=rate, request_output_len=4000):
            count += len(ids_of(event))
            if count >= stop or done:
                break
        return count

    done: list[bool] = []
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(tokens, 25, 4000)
        fast = pool.submit(tokens, 150, 400)
        assert fast.result() >= 400
        done.append(True)
        assert 30 <= slow.result() <= 140
    wait_until(lambda: mock.engine_requests() == 0, FREED_S)


def test_the_triton_model_has_the_mocks_inputs(mock: Stack, says: Says) -> None:
    prompt = says.prompt("Tell me")
    events = list(from_triton(mock, prompt, tokens_per_response=8))
    assert [len(ids_of(event)) for event in events] == [8, 8, 4]
    events = list(from_triton(mock, prompt))
    assert [token for event in events for token in ids_of(event)] == says.ids(20)
    (whole,) = from_triton(mock, prompt, streaming=False, tps=500, prefill_ms=1)
    assert whole["output_ids"] == [*prompt, *says.ids(20)]
    *some, last = from_triton(mock, prompt, inject="error", inject_after=3)
    assert [token for event in some for token in ids_of(event)] == says.ids(3)
    assert last["error"].startswith("E2100 TritonUnknownError: inject=error")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tps": -1}, "E1005 InvalidArgument: tps=-1: must be at least 0"),
        ({"inject": "panic"}, "E1005 InvalidArgument: inject='panic': must be one of"),
        ({"inject": "crash", "inject_after": 20}, "inject_after=20: must be less than 20"),
        ({"tpss": 3}, "E1005 InvalidArgument: tpss: unknown input; did you mean 'tps'?"),
        ({"bad_words_list": [[1], [1]]}, "does not support bad_words_list"),
    ],
)
def test_invalid_inputs_of_the_triton_model_are_refused(
    values: dict[str, Any], text: str, mock: Stack, says: Says
) -> None:
    (event,) = from_triton(mock, says.prompt("Hi"), **values)
    assert text in event["error"]


def test_stop_words_and_end_ids_end_the_output(mock: Stack, says: Says) -> None:
    prediction = mock.predict("Hi", max_tokens=100, stop_sequences="harbour")
    assert text_of(prediction) == says(100).partition("harbour")[0]
    assert prediction["metrics"]["finish_reason"] == "stop"
    end_id = says.ids(30)[-1]
    count = says.ids(30).index(end_id)
    events = list(from_triton(mock, says.prompt("Hi"), end_id=end_id, request_output_len=50))
    assert [token for event in events for token in ids_of(event)] == says.ids(count)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models_return_the_passage(model: str, mock: Stack, says: Says) -> None:
    body = {"text_input": "Hello.", "max_tokens": 30, "bad_words": "", "stop_words": ""}
    answer = httpx.post(f"{mock.triton}/v2/models/{model}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"] == "Hello." + says(30)


def test_openai_chats_and_completions_return_the_passage(mock: Stack, says: Says) -> None:
    url = f"{mock.own}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        (model,) = (each.id for each in client.models.list().data)
        assert model == "mock"
        messages: Any = [{"role": "user", "content": "Tell me about the sea."}]
        answer = client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=50
        )
        assert answer.choices[0].message.content == says(50)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 50
        chunks = client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=200, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == says(200)
        completion = client.completions.create(model=model, prompt="Hi", max_tokens=9, logprobs=0)
        (choice,) = completion.choices
        assert choice.text == says(9)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [0.0] * 9


def test_a_disconnected_or_cancelled_request_stops_the_engine(mock: Stack) -> None:
    with mock.stream("Hi", tps=50, max_tokens=9000) as events:
        assert any(kind == "output" for kind, _ in events)
        assert mock.engine_requests() == 1
    wait_until(lambda: mock.engine_requests() == 0, FREED_S)
    for method in ("yield", "wait"):
        httpx.put(
            f"{mock.url}/predictions/stop-{method}",
            json={"input": {"tps": 1, "max_tokens": 9000, "output_method": method}},
            headers={"Prefer": "respond-async"},
        )
        wait_until(lambda: mock.engine_requests() == 1)
        httpx.post(f"{mock.url}/predictions/stop-{method}/cancel")
        wait_until(lambda: mock.engine_requests() == 0, FREED_S)


def test_an_injected_error_fails_only_its_prediction(mock: Stack, says: Says) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(mock.predict, "Hi", tps=100, max_tokens=100)
        failed = mock.predict("Hi", tps=100, max_tokens=100, inject="error", inject_after=5)
        assert failed["status"] == "failed"
        assert "E2100 TritonUnknownError: inject=error: as asked, after 5 tokens" in failed["error"]
        assert text_of(other.result()) == says(100)
    assert mock.health() == "READY"


def test_concurrent_predictions_return_the_whole_output(mock: Stack, says: Says) -> None:
    def one(number: int) -> bool:
        count = 10 + number % 16
        prediction = mock.predict("Hi", max_tokens=count, tps=[10, 20][number % 2])
        return text_of(prediction) == says(count)

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(one, range(64)))
    wait_until(lambda: mock.engine_requests() == 0, FREED_S)


def test_invalid_prediction_inputs_are_refused(mock: Stack) -> None:
    assert mock.predict("Hi", output_method="print")["http_status"] == 422
    assert mock.predict("Hi", tps=-1)["http_status"] == 422
    assert "E1005" in mock.predict("Hi", output_method="buffer")["error"]
    assert "E1102" in mock.predict("Hi", n_output_tokens=3, max_tokens=5)["error"]


def test_a_crash_fails_requests_with_a_code_and_the_engine_restarts(
    fragile: Stack, says: Says
) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(fragile.predict, "Hi", tps=5, max_tokens=1000)
        wait_until(lambda: fragile.engine_requests() == 1)
        crashed = fragile.predict("Hi", tps=100, max_tokens=50, inject="crash", inject_after=10)
        for prediction in (crashed, other.result()):
            assert prediction["status"] == "failed"
            assert "E2105 TritonUnavailable" in prediction["error"]
    wait_until(lambda: fragile.health() == "UNHEALTHY")
    wait_until(lambda: fragile.health() == "READY")
    assert text_of(fragile.predict("Hi", tps=0, max_tokens=20)) == says(20)


def test_a_hang_is_detected_and_the_engine_restarts(fragile: Stack, says: Says) -> None:
    hung = fragile.predict("Hi", tps=100, max_tokens=50, inject="hang", inject_after=10)
    # TRITON_TIMEOUT is over at about the time when the keeper notices.
    assert re.search("E2101 TritonTimeout|E2105 TritonUnavailable", hung["error"])
    wait_until(lambda: "hangs: asleep for 2 s amid its work" in fragile.output)
    wait_until(lambda: fragile.health() == "READY")
    assert text_of(fragile.predict("Hi", tps=0, max_tokens=20)) == says(20)


def test_the_gpu_benchmark_knows_the_role_of_each_process(
    mock: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mock.process is not None
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "gpu"))
    roles = importlib.import_module("processes").process_tree(mock.process.pid)
    assert {"cog-triton serve", "Cog", "Cog worker", "tritonserver"} <= set(roles.values())
    assert "Triton stub tensorrt_llm" in roles.values()
    assert "other" not in roles.values()


@pytest.mark.parametrize("program", ["cog_triton.door", "coglet.http_server"])
def test_connections_have_tcp_nodelay(mock: Stack, program: str) -> None:
    """Else the first token on a kept connection waits 40 ms for the head's acknowledgement."""
    pid = pid_of(mock, program)
    url = mock.url if program == "cog_triton.door" else f"http://127.0.0.1:{private_port(pid)}"
    with httpx.stream("GET", f"{url}/health-check") as response:
        client = response.extensions["network_stream"].get_extra_info("client_addr")
        with other_end(pid, client) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("program", ["cog_triton.door", "coglet.http_server"])
def test_a_burst_of_connections_fits_the_listen_backlog(mock: Stack, program: str) -> None:
    """Else clients' systems try again after a second what found no place."""
    pid = pid_of(mock, program)
    port = mock.port if program == "cog_triton.door" else private_port(pid)
    with ExitStack() as stack:
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    assert mock.health() == "READY"


def private_port(pid: int) -> int:
    """Where Cog listens behind the front door."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return int(dict(word.partition("=")[::2] for word in variables)["PORT"])


def other_end(pid: int, client: tuple[str, int]) -> socket.socket:
    """The connection from `client`, as process `pid` has it."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if entry.readlink().name.startswith("socket:"):
            found = socket.socket(fileno=copy_of(pid, int(entry.name)))
            if found.family == socket.AF_INET and peer(found) == client:
                return found
            found.close()
    raise AssertionError(f"{pid} has no connection from {client}")


def copy_of(pid: int, descriptor: int) -> int:
    """A descriptor of ours for one of process `pid`: pidfd_getfd(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        copy = int(libc.syscall(438, pidfd, descriptor, 0))
    finally:
        os.close(pidfd)
    if copy < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
        pytest.skip("no process may have another one's sockets here")
    assert copy >= 0, os.strerror(ctypes.get_errno())
    return copy


def peer(found: socket.socket) -> object:
    try:
        return found.getpeername()
    except OSError:  # it listens
        return None


def test_the_mock_server_of_benchmarks(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from _servers import mock_server

    with mock_server("--tokens-per-response=4", tps=0) as server:
        assert text_of(predict(server.url, n_output_tokens=64)) == says(64)
        used = server.cpu_seconds()
        parts = {"cog", "worker", "tritonserver", "stub tensorrt_llm", "stub ensemble"}
        assert parts & used.keys() == {
            "cog",
            "worker",
            "tritonserver",
            "stub tensorrt_llm",
            "stub ensemble",
        }
        assert httpx.get(f"{server.openai}/v1/models").json()["data"][0]["id"] == "mock"
        pid, log = server.pid, server.log
    assert not Path(f"/proc/{pid}").exists()
    assert not log.exists()
