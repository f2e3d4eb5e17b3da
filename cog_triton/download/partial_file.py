"""Partial download on disk: a journal of its finished pieces, and their running checksum."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

from cog_triton.download.http_source import FileIdentity
from cog_triton.system.atomic_write import sync_directory

PIECE = 16 << 20
_CHUNK = 1 << 20


class PartialFile:
    """``<target>.partial`` and ``<target>.partial.journal``, beside `target`; for any thread.

    The journal's first line says of which file the pieces are; each line after it is the number
    of a piece whose bytes are on the disk. A line that was cut short does not count.

    Args:
        hashed: have the file's sha256 at its end: what is finished is hashed meanwhile.
    """

    def __init__(self, target: Path, hashed: bool = False) -> None:
        self._target = target
        self.path = target.with_name(f"{target.name}.partial")
        """The file's path until it is complete."""
        self._journal = target.with_name(f"{target.name}.partial.journal")
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._identity: FileIdentity | None = None
        self._finished: set[int] = set()
        self._hashed = hashed
        self._hashing = threading.Lock()
        self._digest, self._digested = hashlib.sha256(), 0

    def known(self) -> FileIdentity | None:
        """Identity of the file that pieces are here of, None without pieces."""
        return self._read()[0]

    def resume(self, identity: FileIdentity) -> set[int]:
        """Open for writing; returns the finished pieces of `identity`, and drops any others."""
        known, done = self._read()
        if known == identity:
            self._open(os.O_RDWR)
        else:
            self.restart()
            os.truncate(self.path, identity.size)
            done = set()
        header = json.dumps({**asdict(identity), "piece": PIECE})
        fresh = self._journal.with_name(f"{self._journal.name}.new")
        fresh.write_text("\n".join([header, *map(str, sorted(done)), ""]), "utf-8")
        fresh.replace(self._journal)
        self._identity = identity
        self._finished = set(done)
        return done

    def restart(self) -> None:
        """Open for writing, empty and without a journal."""
        self.discard()
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._open(os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def pieces(self) -> dict[int, tuple[int, int]]:
        """Byte range (start, end) of each piece, by its number."""
        size = self._identity.size if self._identity else 0
        starts = range(0, size, PIECE)
        return {number: (at, min(at + PIECE, size)) for number, at in enumerate(starts)}

    def write(self, at: int, data: bytes) -> None:
        """Write `data` at byte `at`; does nothing once closed."""
        with self._lock:  # so that a thread that comes late never writes to another file
            view = memoryview(data)
            while view and self._descriptor is not None:
                count = os.pwrite(self._descriptor, view, at)
                view, at = view[count:], at + count

    def finish(self, number: int) -> None:
        """Sync a finished piece to the disk, then add it to the journal."""
        with self._lock:
            if self._descriptor is None:
                return
            os.fdatasync(self._descriptor)
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(f"{number}\n")
            self._finished.add(number)
        # One thread hashes; what others finish meanwhile it takes, too, or the next one does.
        if self._hashed and self._hashing.acquire(blocking=False):
            try:
                while self._digested // PIECE in self._finished and self._descriptor is not None:
                    if not self._hash_piece():
                        break
            finally:
                self._hashing.release()

    def sha256(self) -> str:
        """Checksum of the whole file, once all of it is there."""
        with self._hashing:
            while self._hash_piece():
                pass
            return self._digest.hexdigest()

    def _hash_piece(self) -> bool:
        """Hash the next piece of the file; False at its end."""
        end = self._digested + PIECE
        with self.path.open("rb") as file:
            file.seek(self._digested)
            while chunk := file.read(min(_CHUNK, end - self._digested)):
                self._digest.update(chunk)
                self._digested += len(chunk)
        return self._digested == end

    def close(self) -> None:
        """Close; pieces and journal stay for the next attempt."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def discard(self) -> None:
        """Remove file and journal."""
        self.close()
        with self._hashing:
            self._finished = set()
            self._digest, self._digested = hashlib.sha256(), 0
        self._journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def complete(self) -> None:
        """Give the whole file its name, atomically, and remove the journal."""
        assert self._descriptor is not None
        os.fsync(self._descriptor)
        self.close()
        self.path.replace(self._target)
        sync_directory(self._target.parent)
        self._journal.unlink(missing_ok=True)

    def _open(self, flags: int) -> None:
        self.close()
        self._descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o644)

    def _read(self) -> tuple[FileIdentity | None, set[int]]:
        try:
            first, *rest = self._journal.read_text("utf-8").split("\n")
            header = json.loads(first)
            piece = header.pop("piece")
            identity = FileIdentity(**header)
            if piece == PIECE and self.path.stat().st_size == identity.size:
                return identity, {int(line) for line in rest[:-1]}
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            pass  # none, or damaged
        return None, set()
