"""Files that the door reads again whenever they change: keys of tenants, and certificates."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cog_triton.errors import CogTritonError, InvalidArgument

_PERIOD_S = 1.0
_SETTLED_S = 2.0
_LOG = logging.getLogger(__name__)


async def keep_current(readers: Sequence[FileReader]) -> None:
    """Have files read again when they change, until cancelled."""
    while True:
        await asyncio.sleep(_PERIOD_S)
        for reader in readers:
            await asyncio.to_thread(reader.refresh)


def read_files(files: Sequence[Path], most: int) -> list[tuple[str, bytes]]:
    """Names and bytes of regular files, `most` bytes in all; raises E1005, and OSError.

    A pipe, or a device without an end, would hold up those who wait for a change.
    """
    found: list[tuple[str, bytes]] = []
    left = most
    for file in files:
        if not stat.S_ISREG(file.stat().st_mode):
            raise InvalidArgument(f"{file}: must be a file, no directory, pipe or device")
        with open(file, "rb", opener=_opened_at_once) as opened:
            data = opened.read(left + 1)
        if len(data) > left:
            raise InvalidArgument(f"{file}: more than {most} bytes, with the files before it")
        left -= len(data)
        found.append((file.name, data))
    return found


def _opened_at_once(path: str, flags: int) -> int:
    """A descriptor, without waiting for a pipe's other end."""
    return os.open(path, flags | os.O_NONBLOCK)


class FileReader(ABC):
    """What the door has from files; wrong ones leave what there was, with a line in the log.

    They are read again when they look different, until they have not changed for two seconds, as
    a second change within a tick of their clock may show in their bytes alone; and for as long as
    they cannot be read, as when descriptors are short.
    """

    most_bytes: ClassVar[int]
    kept: ClassVar[str]
    """What the log says of wrong ones; and `renewed` of right ones."""
    renewed: ClassVar[str]
    _data_hash = b""

    def __init__(self, setting: str) -> None:
        """`setting` is where an error is; raises E1005 where the files are wrong."""
        try:
            self._data_hash = self._read()
        except OSError as error:
            raise InvalidArgument(f"{setting}: {_reason(error)}") from error
        self._seen = self._signature()
        self._told = ""

    @abstractmethod
    def files(self) -> Sequence[Path]:
        """The files of now; raises E1005, and OSError."""

    @abstractmethod
    def take(self, data: Sequence[tuple[str, bytes]]) -> None:
        """Have what is in the files, by their names; raises E1005, and OSError."""

    def refresh(self) -> None:
        """Read the files again if they have changed; blocks."""
        seen = self._signature()
        if seen is not None and seen == self._seen:
            return
        self._seen = seen
        before = self._data_hash
        try:
            self._data_hash = self._read()
        except (CogTritonError, OSError) as error:
            if isinstance(error, OSError):
                self._seen = None
                error = InvalidArgument(_reason(error))
            if str(error) != self._told:
                _LOG.error("%s: %s", self.kept, error)
            self._told = str(error)
            self._data_hash = b""
            return
        if before != self._data_hash:
            _LOG.info(self.renewed)
        self._told = ""

    def _read(self) -> bytes:
        """Have what is in the files, if it is new; its hash."""
        data = read_files(self.files(), self.most_bytes)
        found = hashlib.sha256()
        for name, text in data:
            found.update(b"%d %d " % (len(name), len(text)) + os.fsencode(name) + text)
        if (made := found.digest()) != self._data_hash:
            self.take(data)
        return made

    def _signature(self) -> object:
        """What tells of a change, None while more may come: a Secret's files are links."""
        try:
            found = [(str(file), file.stat()) for file in self.files()]
        except (CogTritonError, OSError):
            return None
        if any(abs(time.time() - one.st_mtime) < _SETTLED_S for _, one in found):
            return None
        return [(name, one.st_ino, one.st_mtime_ns, one.st_size) for name, one in found]


def _reason(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return where + (error.strerror or str(error))
