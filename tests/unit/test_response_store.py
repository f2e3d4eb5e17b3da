"""The file of kept responses: its bounds, what fails, and workers that are killed."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import CogTritonError, NotFound
from cog_triton.serving.openai.response_book import RUNNING, Changes
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.response_store import Recording, ResponseStore
from cog_triton.settings import load_settings

EVENT = b"event: a\ndata: {}\n\n"
LIVES = """
import asyncio, sys
from pathlib import Path
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.response_store import Recording, ResponseStore

async def main():
    store = ResponseStore(ResponseFile(Path(sys.argv[1]), 1 << 20, 3600), 8, 60)
    for name in sys.argv[2:]:
        recording = Recording(name, "", None, "[]", True)
        await store.begin(recording, {"id": name, "status": "in_progress", "output": []})
        for number in range(5):
            store.append(recording, b"event: a\\ndata: %d\\n\\n" % number)
    while store.events(sys.argv[-1], 0).number < 5:
        await asyncio.sleep(0.01)
    print("written", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def opened(path: Path, size: int = 1 << 20, age: float = 3600) -> Iterator[ResponseStore]:
    store = ResponseStore(ResponseFile(path, size, age), 8, 60)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def worker(path: Path, *names: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that makes these responses, and has written five events of each."""
    command = [sys.executable, "-c", LIVES, str(path), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"written\n"
            yield process
        finally:
            process.kill()


def execute(store: ResponseStore, statement: str) -> list[Any]:
    """What a statement gives on the writer's connection."""
    rows: list[Any] = []

    def apply(changes: Changes) -> None:
        connection: sqlite3.Connection = changes._connection  # type: ignore[attr-defined]
        rows.extend(connection.execute(statement))

    store.change("", apply).result()
    return rows


def keep(store: ResponseStore, name: str, tenant: str = "", length: int = 0) -> None:
    body = {"id": name, "status": "completed", "output": [], "text": "x" * length}
    asyncio.run(store.keep(Recording(name, tenant, None, "[]", False), body))


def has(store: ResponseStore, name: str, tenant: str = "") -> bool:
    try:
        return store.read(name, tenant).told()["id"] == name
    except NotFound:
        return False


def test_what_a_killed_worker_made_is_failed_and_can_be_read(tmp_path: Path) -> None:
    with worker(tmp_path, "a", "b") as process, opened(tmp_path) as store:
        assert store.read("a", "").status == RUNNING
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = store.read("a", "")
        assert found.status == "failed"
        assert found.told()["error"]["message"].startswith("E2105 TritonUnavailable: the server")
        events = store.events("a", 2)
        assert (events.data.count(b"\n\n"), events.number, events.status) == (3, 3, "failed")
        assert events.data.startswith(b"event: a\ndata: 2")
    with opened(tmp_path) as store:  # as after a restart, which looks at once
        with sqlite3.connect(tmp_path / "responses-1.sqlite3") as file:
            assert file.execute("SELECT status FROM responses").fetchall() == [("failed",)] * 2
        file.close()
        assert store.read("b", "").told()["error"]["code"] == "server_error"
        assert len(list(tmp_path.glob("*.lock"))) == 1


def test_another_worker_ends_what_this_one_makes(tmp_path: Path) -> None:
    async def main(store: ResponseStore, other: ResponseStore) -> None:
        stopped = asyncio.Event()
        recording = Recording("a", "", None, "[]", True, stopped.set)
        await store.begin(recording, {"id": "a", "status": RUNNING, "output": []})
        other.change("a", lambda changes: None).result()
        other.change("a", lambda changes: changes.delete("a")).result()
        store.append(recording, EVENT)
        await asyncio.wait_for(stopped.wait(), 60)
        assert recording.cancelled
        store.finish(recording, {"id": "a", "status": "cancelled", "output": []})

    with opened(tmp_path) as store, opened(tmp_path) as other:
        asyncio.run(main(store, other))
        assert not has(other, "a")


def test_the_oldest_of_who_has_most_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog_triton.serving.openai.response_store._SWEEP_S", -1)
    with opened(tmp_path, size=10_000) as store:
        keep(store, "mine", "small", 2000)
        for number in range(20):
            keep(store, f"{number}", "large", 2000)
        assert has(store, "mine", "small")
        assert not has(store, "mine", "large")
        left = [number for number in range(20) if has(store, f"{number}", "large")]
        assert left == list(range(20 - len(left), 20))
        assert 2 <= len(left) <= 4


def test_what_is_old_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cog_triton.serving.openai.response_store._SWEEP_S", -1)
    with opened(tmp_path) as store:
        keep(store, "a")
        past = "UPDATE responses SET created = created - 4000"
        execute(store, past)
        assert not has(store, "a")
        keep(store, "b")
        assert execute(store, "SELECT count(*) FROM responses") == [(1,)]


def test_a_file_that_cannot_be_read_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "responses-1.sqlite3").write_bytes(b"no database at all" * 1000)
    with opened(tmp_path) as store:
        keep(store, "a")
        assert has(store, "a")
    assert (tmp_path / "responses-1.sqlite3.broken").exists()


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    with opened(tmp_path / "responses") as store:
        keep(store, "a")
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "responses").iterdir()}
    assert modes == {0o600}
    assert (tmp_path / "responses").stat().st_mode & 0o777 == 0o700


def test_a_disk_that_is_full_is_told_and_leaves_no_half(tmp_path: Path) -> None:
    async def main(store: ResponseStore) -> None:
        recording = Recording("a", "", None, "[]", True)
        await store.begin(recording, {"id": "a", "status": RUNNING, "output": []})
        bound(store, full=True)
        store.append(recording, EVENT * 20_000)
        with pytest.raises(CogTritonError, match="E2302 DiskFull: responses cannot be kept"):
            await store.keep(Recording("b", "", None, "[]", False), long("b"))
        bound(store, full=False)
        store.append(recording, EVENT)
        store.finish(recording, {"id": "a", "status": "completed", "output": []})
        await store.keep(Recording("c", "", None, "[]", False), long("c"))

    def long(name: str) -> dict[str, Any]:
        return {"id": name, "status": "completed", "text": "x" * 200_000}

    def bound(store: ResponseStore, *, full: bool) -> None:
        # 1: as large as it is now
        execute(store, f"PRAGMA max_page_count = {1 if full else 1 << 20}")

    with opened(tmp_path) as store:
        asyncio.run(main(store))
        assert (has(store, "a"), has(store, "b"), has(store, "c")) == (False, False, True)
        assert store.events("a", 0).number == 0


@pytest.mark.parametrize(
    "values", [{"response_store_bytes": 0}, {"cog_triton_swap": "[]"}], ids=["bytes", "swap"]
)
def test_a_setting_turns_it_off(tmp_path: Path, values: dict[str, Any]) -> None:
    settings = load_settings(cog_triton_work_dir=tmp_path, **values)
    assert ResponseStore.of(settings) is None
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_leaves_responses_unkept(tmp_path: Path) -> None:
    (tmp_path / "responses").write_text("a file")
    assert ResponseStore.of(load_settings(cog_triton_work_dir=tmp_path)) is None
