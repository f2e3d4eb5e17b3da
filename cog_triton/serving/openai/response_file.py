"""File of kept responses: SQLite in the work directory, and which workers still write to it.

WAL lets others read while one writes. Each worker holds a lock for as long as it lives, so that
what it has not finished is known to be lost once nobody holds that lock.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cog_triton import errors
from cog_triton.errors import CogTritonError
from cog_triton.serving.openai.response_book import (
    MOST_PARTS,
    RUNNING,
    Changes,
    Entry,
    Events,
    Kept,
    Object,
    events_from,
    failure,
)

_log = logging.getLogger(__name__)

_VERSION = 1
_SCHEMA = f"""
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL,
    created REAL NOT NULL, streamed INTEGER NOT NULL, previous TEXT, input TEXT NOT NULL,
    body TEXT NOT NULL, size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS ages ON responses (created);
CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, first INTEGER NOT NULL,
    count INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (response, first));
PRAGMA user_version = {_VERSION};
"""
_PAGE = 4096
_ENDED = f"status <> '{RUNNING}'"


class ResponseFile:
    """The file in `directory`, which holds `size` bytes of responses for `age` seconds."""

    def __init__(self, directory: Path, size: int, age: float) -> None:
        """Open it, and fail what workers have left that live no more, as when all was killed.

        A file that cannot be read is put aside. Raises OSError or sqlite3.Error.
        """
        self.directory, self._size, self._age = directory, size, age
        self._path = directory / f"responses-{_VERSION}.sqlite3"
        self._writer, self._reader = self._open(), self._open()
        self._read_lock = threading.Lock()
        self.owner, self._lock = self._new_owner()
        self._fail_orphans()

    def read(self, name: str, tenant: str) -> Kept | None:
        """See `ResponseBook.read`."""
        if not name.isascii():  # SQLite takes no lone surrogates
            return None
        with self._read_lock:
            row = self._reader.execute(
                "SELECT status, owner, streamed, previous, input, body FROM responses"
                " WHERE id = ? AND tenant = ? AND created > ?",
                (name, tenant, time.time() - self._age),
            ).fetchone()
        return None if row is None else Kept(*row)

    def owner_of(self, name: str) -> tuple[str, str] | None:
        """See `ResponseBook.owner_of`."""
        if not name.isascii():
            return None
        with self._read_lock:
            return self._owner_of(name)

    def events(self, name: str, first: int) -> Events:
        """See `ResponseBook.events`."""
        with self._read_lock:
            # Before its events, of which the last is written with it.
            owned = self._owner_of(name)
            rows = self._reader.execute(
                "SELECT first, count, data FROM events WHERE response = ? AND first + count > ?"
                f" ORDER BY first LIMIT {MOST_PARTS}",
                (name, first),
            ).fetchall()
        return events_from(first, rows, owned and owned[0])

    def lives(self, owner: str) -> bool:
        """Whether a worker lives; the lock file of one that does not is removed."""
        try:
            lock = _locked(self._lock_of(owner), os.O_RDWR)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        self._lock_of(owner).unlink(missing_ok=True)
        os.close(lock)
        return False

    @contextmanager
    def writing(self) -> Iterator[Changes]:
        """See `ResponseBook.writing`."""
        try:
            with self._writer:
                self._writer.execute("BEGIN IMMEDIATE")
                yield _FileChanges(self._writer, self.owner, self._size, self._age)
        except sqlite3.Error as error:
            raise coded(error) from error

    def close(self) -> None:
        """See `ResponseBook.close`."""
        with self._read_lock:
            self._reader.close()
        self._writer.close()
        os.close(self._lock)

    def _open(self) -> sqlite3.Connection:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return self._connected()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # a full disk, a lock
                raise
            aside = self._path.rename(f"{self._path}.broken")
            _log.error("responses that were kept cannot be read, and are now %s: %s", aside, error)
            return self._connected()

    def _connected(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=10, check_same_thread=False)
        connection.executescript(_SCHEMA)
        pages = (self._size + (self._size >> 2) + (64 << 20)) // _PAGE
        for pragma in (
            *("synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"),
            *(f"max_page_count = {pages}", "journal_size_limit = 8388608"),
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    def _owner_of(self, name: str) -> tuple[str, str] | None:
        query = "SELECT status, owner FROM responses WHERE id = ?"
        found: tuple[str, str] | None = self._reader.execute(query, (name,)).fetchone()
        return found

    def _fail_orphans(self) -> None:
        running = "SELECT id, owner FROM responses WHERE status = ?"
        rows = self._writer.execute(running, (RUNNING,)).fetchall()
        lost = [name for name, owner in rows if not self.lives(owner)]
        with self._writer:
            changes = _FileChanges(self._writer, self.owner, self._size, self._age)
            for name in lost:
                changes.end(name, failure())
        if lost:
            _log.warning("responses that were made when a server ended, now failed: %d", len(lost))
        for path in self.directory.glob("*.lock"):
            self.lives(path.stem)

    def _new_owner(self) -> tuple[str, int]:
        """A name for this worker, and the descriptor of its lock, which ends with the process."""
        while True:
            owner = secrets.token_hex(8)
            with suppress(BlockingIOError, FileNotFoundError):  # another has looked at it just now
                lock = _locked(self._lock_of(owner), os.O_RDWR | os.O_CREAT)
                if os.fstat(lock).st_nlink:
                    return owner, lock
                os.close(lock)

    def _lock_of(self, owner: str) -> Path:
        return self.directory / f"{owner}.lock"


class _FileChanges:
    """A transaction of the file; see `Changes`."""

    def __init__(self, connection: sqlite3.Connection, owner: str, size: int, age: float) -> None:
        self._connection, self._owner, self._size, self._age = connection, owner, size, age

    def insert(self, entry: Entry) -> None:
        given = (entry.name, entry.tenant, self._owner, entry.status, entry.created)
        rest = (entry.streamed, entry.previous, entry.input, entry.body, entry.size)
        places = ", ".join("?" * len((*given, *rest)))
        self._connection.execute(f"INSERT INTO responses VALUES ({places})", (*given, *rest))

    def append(
        self, name: str, first: int, count: int, data: bytes, lost: Callable[[], None]
    ) -> None:
        found = self._connection.execute(
            "UPDATE responses SET size = size + ? WHERE id = ? AND status = ?",
            (len(data), name, RUNNING),
        )
        if not found.rowcount:
            lost()
            return
        values = (name, first, count, data)
        self._connection.execute("INSERT INTO events VALUES (?, ?, ?, ?)", values)

    def end(self, name: str, changes: Object) -> None:
        row = self._connection.execute(
            "SELECT body FROM responses WHERE id = ? AND status = ?", (name, RUNNING)
        ).fetchone()
        if row is not None:
            text = json.dumps(json.loads(row[0]) | changes)
            statement = "UPDATE responses SET status = ?, body = ? WHERE id = ?"
            self._connection.execute(statement, (changes["status"], text, name))

    def delete(self, name: str) -> None:
        self._connection.execute("DELETE FROM responses WHERE id = ?", (name,))

    def sweep(self) -> None:
        connection = self._connection
        old = (time.time() - self._age,)
        connection.execute(f"DELETE FROM responses WHERE created < ? AND {_ENDED}", old)
        (total,) = connection.execute("SELECT coalesce(sum(size), 0) FROM responses").fetchone()
        while total > self._size:
            found = connection.execute(
                f"SELECT id, size FROM responses WHERE {_ENDED} AND tenant = (SELECT tenant FROM"
                f" responses WHERE {_ENDED} GROUP BY tenant ORDER BY sum(size) DESC LIMIT 1)"
                " ORDER BY created LIMIT 1"
            ).fetchone()
            if found is None:
                break
            self.delete(found[0])
            total -= found[1]
        connection.execute("PRAGMA incremental_vacuum(1024)").fetchall()


def coded(error: sqlite3.Error) -> CogTritonError:
    """E2302 for a full disk, else E2100."""
    text = f"responses cannot be kept: {error}"
    full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return errors.DiskFull(text) if full else errors.TritonUnknownError(text)


def _locked(path: Path, flags: int) -> int:
    """Descriptor of a locked file; raises BlockingIOError while another process has the lock."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
