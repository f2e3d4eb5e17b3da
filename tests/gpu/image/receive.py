"""Kit of scripts/pack-image as it arrives: parts are kept, and read as one stream that waits."""

from __future__ import annotations

import io
import shutil
import time
from pathlib import Path

from digests import sha256

SUMS = "SHA256SUMS"
_POLL_S = 0.2


class Kit:
    """The parts in `directory`; `SHA256SUMS` comes with the first of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def take(self, carried: Path) -> list[str]:
        """Copy what `carried` holds; returns the files whose checksum is wrong."""
        self.directory.mkdir(parents=True, exist_ok=True)
        sums = carried / SUMS
        if sums.is_file():
            shutil.copy(sums, self.directory)
        expected = self.sums()
        wrong = []
        for path in sorted(carried.rglob("*")):
            name = path.relative_to(carried).as_posix()
            target = self.directory / name
            if not path.is_file() or name == SUMS or target.exists():
                continue
            if name in expected and sha256(path) != expected[name]:
                wrong.append(name)
                continue
            target.parent.mkdir(exist_ok=True)
            new = target.with_name(f".{target.name}")
            shutil.copy(path, new)
            new.replace(target)
        return wrong

    def sums(self) -> dict[str, str]:
        """SHA-256 of each file of the kit, by name."""
        lines = (self.directory / SUMS).read_text("utf-8").splitlines()
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}

    def missing(self) -> list[str]:
        """Names of the parts that have not come."""
        names = sorted(name for name in self.sums() if name.startswith("part-"))
        return [name for name in names if not (self.directory / name).is_file()]


class Stream(io.RawIOBase):
    """The parts as one file that is read once; a read waits for a part that has not come.

    Raises TimeoutError where none comes for `patience_s` seconds. A part that was read is deleted
    if `delete`.
    """

    def __init__(self, kit: Kit, patience_s: float, *, delete: bool = False) -> None:
        self._kit, self._patience_s, self._delete = kit, patience_s, delete
        self._names = sorted(name for name in kit.sums() if name.startswith("part-"))
        self._file: io.BufferedReader | None = None
        self._path = Path()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            if self._file is None:
                if not self._names:
                    return 0
                self._path = self._kit.directory / self._names.pop(0)
                self._wait_for(self._path)
                self._file = self._path.open("rb")
            if count := self._file.readinto(buffer):
                return count
            self._file.close()
            self._file = None
            if self._delete:
                self._path.unlink()

    def _wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + self._patience_s
        while not path.is_file():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name} has not come")
            time.sleep(_POLL_S)
