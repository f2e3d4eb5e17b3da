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
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cog_triton import errors
from cog_triton.errors import CogTritonError

_log = logging.getLogger(__name__)

Object = dict[str, Any]
RUNNING = "in_progress"
END = b"\n\n"
"""What ends an event."""
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
_ROWS = 64
_PAGE = 4096
_ENDED = f"status <> '{RUNNING}'"


class Kept(NamedTuple):
    """A response as it is kept; `owner` is the worker that makes it, or has."""

    status: str
    owner: str
    streamed: int
    previous: str | None
    input: str
    body: str

    def told(self) -> Object:
        """The response object."""
        found: Object = json.loads(self.body)
        return found


class Events(NamedTuple):
    """Events of a stream, joined, and their number; `left` says whether more are there already.

    `status` is that of the response, None once it is gone.
    """

    data: bytes
    number: int
    left: bool
    status: str | None


@dataclass(frozen=True, slots=True)
class ResponseFile:
    """The file in `directory`, which holds `size` bytes of responses for `age` seconds."""

    directory: Path
    size: int
    age: float

    @property
    def _path(self) -> Path:
        return self.directory / f"responses-{_VERSION}.sqlite3"

    def open(self) -> sqlite3.Connection:
        """A connection, for any thread; a file that cannot be read is put aside."""
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
        pages = (self.size + (self.size >> 2) + (64 << 20)) // _PAGE
        for pragma in (
            *("synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"),
            *(f"max_page_count = {pages}", "journal_size_limit = 8388608"),
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    def read(self, connection: sqlite3.Connection, name: str, tenant: str) -> Kept | None:
        """A response of a tenant, if it is kept."""
        row = connection.execute(
            "SELECT status, owner, streamed, previous, input, body FROM responses"
            " WHERE id = ? AND tenant = ? AND created > ?",
            (name, tenant, time.time() - self.age),
        ).fetchone()
        return None if row is None else Kept(*row)

    def sweep(self, connection: sqlite3.Connection) -> None:
        """Remove what is too old; then, of the tenant that has most, the oldest, down to `size`.

        What is being made stays.
        """
        old = (time.time() - self.age,)
        connection.execute(f"DELETE FROM responses WHERE created < ? AND {_ENDED}", old)
        (total,) = connection.execute("SELECT coalesce(sum(size), 0) FROM responses").fetchone()
        while total > self.size:
            found = connection.execute(
                f"SELECT id, size FROM responses WHERE {_ENDED} AND tenant = (SELECT tenant FROM"
                f" responses WHERE {_ENDED} GROUP BY tenant ORDER BY sum(size) DESC LIMIT 1)"
                " ORDER BY created LIMIT 1"
            ).fetchone()
            if found is None:
                break
            delete(connection, found[0])
            total -= found[1]
        connection.execute("PRAGMA incremental_vacuum(1024)").fetchall()

    def fail_orphans(self, connection: sqlite3.Connection) -> None:
        """Fail what workers have left that live no more, as when all was killed."""
        running = "SELECT id, owner FROM responses WHERE status = ?"
        rows = connection.execute(running, (RUNNING,)).fetchall()
        lost = [name for name, owner in rows if not self.lives(owner)]
        with connection:
            for name in lost:
                fail(connection, name)
        if lost:
            _log.warning("responses that were made when a server ended, now failed: %d", len(lost))
        for path in self.directory.glob("*.lock"):
            self.lives(path.stem)

    def new_owner(self) -> tuple[str, int]:
        """A name for this worker, and the descriptor of its lock, which ends with the process."""
        while True:
            owner = secrets.token_hex(8)
            with suppress(BlockingIOError, FileNotFoundError):  # another has looked at it just now
                lock = _locked(self._lock_of(owner), os.O_RDWR | os.O_CREAT)
                if os.fstat(lock).st_nlink:
                    return owner, lock
                os.close(lock)

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

    def _lock_of(self, owner: str) -> Path:
        return self.directory / f"{owner}.lock"


def owner_of(connection: sqlite3.Connection, name: str) -> tuple[str, str] | None:
    """Status and owner of a response, if it is kept."""
    query = "SELECT status, owner FROM responses WHERE id = ?"
    found: tuple[str, str] | None = connection.execute(query, (name,)).fetchone()
    return found


def events(connection: sqlite3.Connection, name: str, first: int) -> Events:
    """Events of a response from number `first` on."""
    owned = owner_of(connection, name)  # before its events, of which the last is written with it
    rows = connection.execute(
        "SELECT first, count, data FROM events WHERE response = ? AND first + count > ?"
        f" ORDER BY first LIMIT {_ROWS}",
        (name, first),
    ).fetchall()
    data, number = b"".join(row[2] for row in rows), sum(row[1] for row in rows)
    if rows and (known := first - rows[0][0]) > 0:
        data, number = data.split(END, known)[known], number - known
    return Events(data, number, len(rows) == _ROWS, owned and owned[0])


def delete(connection: sqlite3.Connection, name: str) -> None:
    """Remove a response, and its events."""
    connection.execute("DELETE FROM responses WHERE id = ?", (name,))


def fail(connection: sqlite3.Connection, name: str) -> None:
    """Fail a response whose worker lives no more."""
    error = errors.TritonUnavailable("the server ended while it made this response")
    end(connection, name, {"status": "failed", "error": error_of(error)})


def end(connection: sqlite3.Connection, name: str, changes: Object) -> None:
    """Change the object of a response that is being made, its status above all."""
    row = connection.execute(
        "SELECT body FROM responses WHERE id = ? AND status = ?", (name, RUNNING)
    ).fetchone()
    if row is not None:
        text = json.dumps(json.loads(row[0]) | changes)
        statement = "UPDATE responses SET status = ?, body = ? WHERE id = ?"
        connection.execute(statement, (changes["status"], text, name))


def error_of(error: CogTritonError) -> Object:
    """The `error` of a failed response: OpenAI's code, and ours in the message."""
    return {"code": "server_error", "message": str(error)}


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
