"""The mock engine behind the real Cog and the real Triton: what it says, and at what rate."""

import asyncio
import ctypes
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate, islice
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from engine_fixtures import ENDLESS, MockText
from stack import Stack, pid_of, text_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]

# Triton loses responses when some 278 of them wait for its HTTP thread; see docs/mock.md. So no
# test has more than 250 tokens flat out, or a rate at which so many gather in a fifth of a second.


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


def test_yield_mode_streams_and_wait_mode_does_not(mock: Stack, mock_text: MockText) -> None:
    with mock.stream("Hi", n_output_tokens=ENDLESS) as events:
        live = (data["chunk"] for kind, data in events if kind == "output")
        beginning = "".join(islice(live, 3))
        wait_until(lambda: mock.engine_requests() == 1)
    assert mock_text(ENDLESS).startswith(beginning)
    wait_until(lambda: mock.engine_requests() == 0)
    assert "".join(outputs(mock, tps=50, n_output_tokens=75)) == mock_text(75)
    assert outputs(mock, tps=50, n_output_tokens=60, output_method="wait") == [mock_text(60)]


def test_buffer_mode_sends_pieces_of_a_number_of_tokens(mock: Stack, mock_text: MockText) -> None:
    buffer = {"output_method": "buffer", "buffer_size": 10}
    with mock.stream("Hi", n_output_tokens=ENDLESS, **buffer) as events:
        live = (data["chunk"] for kind, data in events if kind == "output")
        first, second = islice(live, 2)
        wait_until(lambda: mock.engine_requests() == 1)
    assert first.startswith(mock_text(10))
    assert second
    assert mock_text(ENDLESS).startswith(first + second)
    wait_until(lambda: mock.engine_requests() == 0)
    pieces = outputs(mock, tps=50, n_output_tokens=50, **buffer)
    assert "".join(pieces) == mock_text(50)
    assert len(pieces) <= 5
    (piece,) = outputs(mock, n_output_tokens=50, output_method="buffer", buffer_size=1000)
    assert piece == mock_text(50)


def test_streams_have_the_rates_that_they_ask_for(mock: Stack, mock_text: MockText) -> None:
    """A slow machine delays a token, but no stream has one before it is due."""
    rates = {"slow": 5, "fast": 200}
    counts = dict.fromkeys(rates, 0)
    begun = time.monotonic()

    def read(name: str, stop: int) -> None:
        """Read until so many tokens have come, or the other stream has ended."""
        asked = {"tps": rates[name], "request_output_len": 300 * rates[name]}
        try:
            for event in from_triton(mock, mock_text.encode("Hi"), **asked):
                counts[name] += len(ids_of(event))
                passed = time.monotonic() - begun
                assert counts[name] <= rates[name] * passed + 1  # the jitter is less than a token
                if counts[name] >= stop or ended.is_set():
                    return
        finally:
            ended.set()

    ended = Event()
    with ThreadPoolExecutor(2) as pool:
        slow, fast = pool.submit(read, "slow", ENDLESS), pool.submit(read, "fast", 400)
        fast.result()
        slow.result()
    assert 1 <= counts["slow"] < counts["fast"] / 2
    assert counts["fast"] >= 400
    wait_until(lambda: mock.engine_requests() == 0)


def test_the_triton_model_has_the_mocks_inputs(mock: Stack, mock_text: MockText) -> None:
    prompt = mock_text.encode("Tell me")
    events = list(from_triton(mock, prompt, tokens_per_response=8, tps=20))
    ends = list(accumulate(len(ids_of(event)) for event in events))
    assert ends[-1] == 20
    assert {*ends} <= {8, 16, 20}  # responses that are late are joined
    events = list(from_triton(mock, prompt))
    assert [token for event in events for token in ids_of(event)] == mock_text.ids(20)
    (whole,) = from_triton(mock, prompt, streaming=False, tps=500, prefill_ms=1)
    assert whole["output_ids"] == [*prompt, *mock_text.ids(20)]
    *some, last = from_triton(mock, prompt, inject="error", inject_after=3)
    assert [token for event in some for token in ids_of(event)] == mock_text.ids(3)
    assert last["error"].startswith("E2100 TritonUnknownError: inject=error")


def test_a_disconnected_or_cancelled_request_stops_the_engine(mock: Stack) -> None:
    with mock.stream("Hi", max_tokens=ENDLESS) as events:
        assert any(kind == "output" for kind, _ in events)
        wait_until(lambda: mock.engine_requests() == 1)
    wait_until(lambda: mock.engine_requests() == 0)
    for method in ("yield", "wait"):
        httpx.put(
            f"{mock.url}/predictions/stop-{method}",
            json={"input": {"tps": 1, "max_tokens": 300, "output_method": method}},
            headers={"Prefer": "respond-async"},
            timeout=60,
        )
        wait_until(lambda: mock.engine_requests() == 1)
        httpx.post(f"{mock.url}/predictions/stop-{method}/cancel", timeout=60)
        wait_until(lambda: mock.engine_requests() == 0)


def test_an_injected_error_fails_only_its_prediction(mock: Stack, mock_text: MockText) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(mock.predict, "Hi", tps=100, max_tokens=100)
        failed = mock.predict("Hi", tps=100, max_tokens=100, inject="error", inject_after=5)
        assert failed["status"] == "failed"
        assert "E2100 TritonUnknownError: inject=error: as asked, after 5 tokens" in failed["error"]
        assert text_of(other.result()) == mock_text(100)
    wait_until(lambda: mock.health() == "READY")


def test_connections_have_tcp_nodelay(mock: Stack) -> None:
    """Else the first token on a kept connection waits 40 ms for the head's acknowledgement."""
    pid = pid_of(mock, "cog_triton.front.server")
    with httpx.stream("GET", f"{mock.url}/health-check", timeout=60) as response:
        client = response.extensions["network_stream"].get_extra_info("client_addr")
        with other_end(pid, client) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_burst_of_connections_fits_the_listen_backlog(mock: Stack) -> None:
    """Else clients' systems try again after a second what found no place."""
    pid = pid_of(mock, "cog_triton.front.server")
    with ExitStack() as stack:
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", mock.port), timeout=60))
    wait_until(lambda: mock.health() == "READY")


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
