"""Responses in SQLite, in the work directory that a user's servers share."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cog_triton import errors
from cog_triton.serving.openai.response_store import RUNNING, StoredResponse

_log = logging.getLogger(__name__)

# 0.4 has the same table, and uses `streamed`; it counts events in `size`.
_SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL,
    created REAL NOT NULL, streamed INTEGER NOT NULL, previous TEXT, input TEXT NOT NULL,
    body TEXT NOT NULL, size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS ages ON responses (created);
CREATE INDEX IF NOT EXISTS sizes ON responses (status, tenant, size);
PRAGMA user_version = 1;
PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON; PRAGMA secure_delete = ON;
PRAGMA journal_size_limit = 8388608; PRAGMA max_page_count = {pages};
"""
_INSERT = """
INSERT INTO responses VALUES (:id, :tenant, :owner, :status, :created, 0, :previous, :input, :body,
    length(:input) + length(:body))
"""
_READ = """
SELECT id, tenant, status, created, previous, input, body, owner FROM responses
WHERE id = ? AND tenant = ? AND created > ?
"""
_END = "UPDATE responses SET status = ?, body = ?, size = length(input) + ? WHERE id = ?"
_DELETE = "DELETE FROM responses WHERE id = ?"
_OLDEST = f"""
SELECT id, size FROM responses WHERE status <> '{RUNNING}' AND tenant = (
    SELECT tenant FROM responses WHERE status <> '{RUNNING}'
    GROUP BY tenant ORDER BY sum(size) DESC LIMIT 1
) ORDER BY created LIMIT 1
"""
_PAGE, _SWEEP_S = 4096, 1.0


class ResponseFile:
    """The file in `directory`, which has up to `size` bytes of responses for `age` seconds."""

    def __init__(self, directory: Path, size: int, age: float) -> None:
        """Open it; a file that cannot be read is moved aside. Raises OSError or sqlite3.Error."""
        self._size, self._age, self._swept = size, age, float("-inf")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / "responses-1.sqlite3"
        try:
            self._file = self._connected(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # a full disk, a lock
                raise
            aside = path.rename(f"{path}.broken")
            _log.error("stored responses cannot be read, and are now %s: %s", aside, error)
            self._file = self._connected(path)
        (locks := directory / "servers.lock").touch(0o600)
        self._locks, self._owner = locks.open("r+b"), secrets.token_hex(7)
        self._lock(self._owner, fcntl.LOCK_EX)
        self._thread = ThreadPoolExecutor(1, "responses")

    async def add(self, response: StoredResponse) -> None:
        """See `ResponseStore.add`."""
        if (now := time.monotonic()) - self._swept > _SWEEP_S:
            self._swept = now
            await self._run(self._sweep)
        values = {**response._asdict(), "owner": self._owner}
        await self._run(lambda file: file.execute(_INSERT, values))

    async def end(self, name: str, status: str, body: str) -> None:
        """See `ResponseStore.end`."""
        await self._run(lambda file: file.execute(_END, (status, body, len(body), name)))

    async def read(self, name: str, tenant: str) -> StoredResponse | None:
        """See `ResponseStore.read`."""
        values = name, tenant, time.time() - self._age
        if (row := await self._run(lambda file: file.execute(_READ, values).fetchone())) is None:
            return None
        found = StoredResponse(*row)
        running = found.status == RUNNING and found.owner != self._owner
        return found._replace(elsewhere=running and self._lives(found.owner))

    async def delete(self, name: str) -> None:
        """See `ResponseStore.delete`."""
        await self._run(lambda file: file.execute(_DELETE, (name,)))

    async def cancel(self, response: StoredResponse) -> bool:
        """See `ResponseStore.cancel`; there is no way to the other server."""
        return False

    def close(self) -> None:
        """Finish what was begun, and end this server's part in it."""
        self._thread.shutdown()
        self._file.close()
        self._locks.close()

    def _connected(self, path: Path) -> sqlite3.Connection:
        path.touch(0o600)
        file = sqlite3.connect(path, timeout=10, check_same_thread=False)
        pages = (self._size + (self._size >> 2) + (64 << 20)) // _PAGE
        file.executescript(_SCHEMA.format(pages=pages))
        return file

    async def _run(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """Do `work` on the thread, wholly or not at all: no event loop waits for a disk."""

        def run() -> Any:
            with self._file as file:
                return work(file)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except sqlite3.Error as error:
            text = f"responses cannot be kept: {error}"
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise (errors.DiskFull if full else errors.TritonUnknownError)(text) from error

    def _lives(self, owner: str) -> bool:
        """Whether another server runs: it has its lock for as long."""
        try:
            self._lock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        self._lock(owner, fcntl.LOCK_UN)
        return False

    def _lock(self, owner: str, how: int) -> None:
        """Lock a server's byte; owners of 0.4 have more digits than a file has bytes."""
        fcntl.lockf(self._locks, how, 1, int(owner[:15], 16))

    def _sweep(self, file: sqlite3.Connection) -> None:
        """Remove what is too old, and the oldest if they are too many."""
        file.execute("DELETE FROM responses WHERE created < ?", (time.time() - self._age,))
        (total,) = file.execute("SELECT total(size) FROM responses").fetchone()
        while total > self._size and (oldest := file.execute(_OLDEST).fetchone()) is not None:
            file.execute(_DELETE, oldest[:1])
            total -= oldest[1]
        file.execute("PRAGMA incremental_vacuum(1024)").fetchall()
