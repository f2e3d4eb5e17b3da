"""The file of kept responses: its bounds, what fails, and workers that are killed."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import kept_responses
import pytest
from kept_responses import EVENT, has, keep, kept_in, worker

from cog_triton.errors import CogTritonError
from cog_triton.serving.openai.response_book import RUNNING, Changes
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.response_store import Recording, ResponseStore
from cog_triton.settings import load_settings

LIVES = """
from pathlib import Path
from cog_triton.serving.openai.response_file import ResponseFile
book = ResponseFile(Path({path!r}), 1 << 20, 3600)
"""


def opened(
    path: Path, size: int = 1 << 20, age: float = 3600
) -> AbstractContextManager[ResponseStore]:
    return kept_in(ResponseFile(path, size, age))


def execute(store: ResponseStore, statement: str) -> list[Any]:
    """What a statement gives on the writer's connection."""
    rows: list[Any] = []

    def apply(changes: Changes) -> None:
        connection: sqlite3.Connection = changes._connection  # type: ignore[attr-defined]
        rows.extend(connection.execute(statement))

    store.change("", apply).result()
    return rows


def test_what_a_killed_worker_made_is_failed_and_can_be_read(tmp_path: Path) -> None:
    setup = LIVES.format(path=str(tmp_path))
    with worker(setup, "a", "b") as process, opened(tmp_path) as store:
        kept_responses.kill_the_worker_of(store, process, lambda found: found())
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
    kept_responses.fill_until_the_oldest_go(opened(tmp_path, size=10_000))


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


def test_a_setting_turns_it_off(tmp_path: Path) -> None:
    settings = load_settings(cog_triton_work_dir=tmp_path, response_store_bytes=0)
    assert ResponseStore.of(settings) is None
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_leaves_responses_unkept(tmp_path: Path) -> None:
    (tmp_path / "responses").write_text("a file")
    assert ResponseStore.of(load_settings(cog_triton_work_dir=tmp_path)) is None
