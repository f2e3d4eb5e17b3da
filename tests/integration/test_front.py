"""The front before the real Cog and Triton: what it keeps from them, and how it ends."""

import json
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from stack import REPOSITORY, Stack, pid_of, processes_of, start_times, text_of, wait_until

pytestmark = pytest.mark.integration

IMAGE = [sys.executable, "-m", "cog_triton.serve"]
MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "40"}
IN_COG = {"COG_PREDICT_TYPE_STUB": "predict.py:Predictor"}


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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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
