"""Where responses are stored: the file, and what tests/stores asks of Redis, too."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from loop_thread import OnLoop, call

from cog_triton.errors import CogTritonError, NotFound
from cog_triton.serving.openai import response_file
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.response_store import RUNNING, StoredResponse
from cog_triton.serving.openai.stored_responses import RunningResponses
from cog_triton.settings import load_settings

LIVES = """
import asyncio, sys, time
from pathlib import Path
sys.path.append({tools!r})
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.response_redis import ResponseRedis
from cog_triton.serving.openai.response_store import StoredResponse

async def main():
    store = {store}
    if isinstance(store, ResponseRedis):
        await store.live(lambda name: print("cancel", name, flush=True))
    body = '{{"status": "in_progress"}}'
    await store.add(StoredResponse("resp-lost", "", "in_progress", time.time(), None, "[]", body))
    print("stored", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
TOOLS = str(Path(__file__).parents[2] / ".work" / "tools")


class Open(Protocol):
    def __call__(self, size: int = 1 << 20, age: float = 3600) -> AbstractContextManager[Any]: ...


def stored(name: str, tenant: str = "", status: str = "completed", length: int = 0) -> Any:
    body = json.dumps({"id": name, "status": status, "output": [], "text": "x" * length})
    return StoredResponse(name, tenant, status, time.time(), None, "[]", body)


@contextmanager
def another(store: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another server that shares the store, and makes the response `resp-lost`."""
    command = [sys.executable, "-c", LIVES.format(tools=TOOLS, store=store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"stored\n"
            yield process
        finally:
            process.kill()


def has(store: Any, name: str, tenant: str = "") -> bool:
    return store.read(name, tenant) is not None


def fill_until_the_oldest_go(open_store: Open) -> None:
    """In a store of 10 kB who has least keeps it; of who has most, the oldest ones go."""
    with open_store(size=10_000) as store:
        store.add(stored("mine", "small", length=2000))
        for number in range(20):
            store.add(stored(f"{number}", "large", RUNNING))
            store.end(f"{number}", "completed", "x" * 2000)
        assert has(store, "mine", "small")
        assert not has(store, "mine", "large")
        left = [number for number in range(20) if has(store, f"{number}", "large")]
        assert left == list(range(20 - len(left), 20))
        assert 2 <= len(left) <= 4


def change_once(open_store: Open) -> None:
    with open_store() as store:
        store.add(stored("a", status=RUNNING))
        assert (store.read("a", "").status, store.read("a", "").elsewhere) == (RUNNING, False)
        store.end("a", "completed", "{}")
        assert (store.read("a", "").status, store.read("a", "").body) == ("completed", "{}")
        store.delete("a")
        store.end("a", "completed", "{}")
        assert not has(store, "a")


def fail_what_a_killed_server_made(store: Any, process: subprocess.Popen[bytes]) -> None:
    responses = call(RunningResponses, store.own, 8, 60)
    assert call(responses.read, "resp-lost", "").elsewhere
    process.send_signal(signal.SIGKILL)
    process.wait()
    while call(responses.read, "resp-lost", "").elsewhere:
        time.sleep(0.05)
    found = json.loads(call(responses.read, "resp-lost", "").body)
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert found["error"]["message"].startswith("E2105 TritonUnavailable: the server")
    with pytest.raises(NotFound):
        call(responses.read, "resp-lost", "other")


@pytest.fixture
def open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr(response_file, "_SWEEP_S", -1)

    @contextmanager
    def opened(size: int = 1 << 20, age: float = 3600) -> Iterator[Any]:
        with closing(ResponseFile(tmp_path / "responses", size, age)) as file:
            yield OnLoop(file)

    return opened


@pytest.mark.parametrize("check", [fill_until_the_oldest_go, change_once])
def test_it_has_bounds_and_changes_once(open_file: Open, check: Callable[[Open], None]) -> None:
    check(open_file)


def test_what_a_killed_server_made_is_failed(open_file: Open, tmp_path: Path) -> None:
    file = f"ResponseFile(Path({str(tmp_path / 'responses')!r}), 1 << 20, 3600)"
    with another(file) as process, open_file() as store:
        assert store.cancel(store.read("resp-lost", "")) is False
        fail_what_a_killed_server_made(store, process)


def test_a_file_that_cannot_be_read_is_put_aside(open_file: Open, tmp_path: Path) -> None:
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / "responses-1.sqlite3").write_bytes(b"no database at all" * 1000)
    with open_file() as store:
        store.add(stored("a"))
        assert has(store, "a")
    assert (tmp_path / "responses" / "responses-1.sqlite3.broken").exists()


def test_answers_that_0_4_stored_are_read(open_file: Open, tmp_path: Path) -> None:
    (tmp_path / "responses").mkdir()
    file = sqlite3.connect(tmp_path / "responses" / "responses-1.sqlite3")
    file.executescript("""
        CREATE TABLE responses (
            id TEXT PRIMARY KEY, tenant TEXT NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL,
            created REAL NOT NULL, streamed INTEGER NOT NULL, previous TEXT, input TEXT NOT NULL,
            body TEXT NOT NULL, size INTEGER NOT NULL);
        CREATE TABLE events (
            response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
            first INTEGER NOT NULL, count INTEGER NOT NULL, data BLOB NOT NULL,
            PRIMARY KEY (response, first));
        PRAGMA user_version = 1;""")
    rows = [(name, "", "f" * 16, name, time.time(), 1, None, "[]", '{"output": []}', 9) for name in
            ("completed", RUNNING)]  # fmt: skip
    file.executemany("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    file.execute("INSERT INTO events VALUES ('completed', 0, 1, '')")
    file.commit()
    file.close()
    with open_file() as store:
        responses = call(RunningResponses, store.own, 8, 60)
        assert call(responses.read, "completed", "").body == '{"output": []}'
        assert call(responses.read, RUNNING, "").status == "failed"
        store.delete("completed")
        assert store.own._file.execute("SELECT * FROM events").fetchall() == []


def test_a_disk_that_is_full_is_told(open_file: Open) -> None:
    with open_file() as store:
        responses = call(RunningResponses, store.own, 8, 60)
        store.add(stored("a", status=RUNNING))
        store.own._file.execute("PRAGMA max_page_count = 1")  # as large as it is now
        for change in (store.add, lambda each: store.end("a", each.status, each.body)):
            with pytest.raises(CogTritonError, match="E2302 DiskFull: responses cannot be kept"):
                change(stored("b", length=200_000))
        assert call(responses.read, "a", "").status == "failed"
        store.own._file.execute(f"PRAGMA max_page_count = {1 << 20}")
        store.add(stored("c", length=200_000))
        assert (has(store, "b"), has(store, "c")) == (False, True)


def test_nothing_is_stored_as_settings_say_or_if_the_directory_is_none(tmp_path: Path) -> None:
    settings = load_settings(cog_triton_work_dir=tmp_path, response_store_bytes=0)
    assert call(RunningResponses.of, settings) is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "responses").write_text("a file")
    assert call(RunningResponses.of, load_settings(cog_triton_work_dir=tmp_path)) is None
