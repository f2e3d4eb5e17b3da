"""Files that the front reads again whenever they change: keys of tenants, and certificates."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cog_triton.errors import CogTritonError, InvalidArgument

_PERIOD_S = 1.0
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
    """What the front has from files; wrong ones leave what there was, with a line in the log.

    They are read each second: of two changes within a tick of their clock, the times are the same.
    """

    most_bytes: ClassVar[int]
    kept: ClassVar[str]
    """What the log says of wrong ones; and `renewed` of right ones."""
    renewed: ClassVar[str]
    _data_hash = b""

    def __init__(self, setting: str) -> None:
        """`setting` is where an error is; raises E1005 where the files are wrong."""
        try:
            self._read()
        except OSError as error:
            raise InvalidArgument(f"{setting}: {_reason(error)}") from error
        self._told = ""

    @abstractmethod
    def files(self) -> Sequence[Path]:
        """The files of now; raises E1005, and OSError."""

    @abstractmethod
    def take(self, data: Sequence[tuple[str, bytes]]) -> None:
        """Have what is in the files, by their names; raises E1005, and OSError."""

    def refresh(self) -> None:
        """Read the files again; blocks."""
        before, problem = self._data_hash, ""
        try:
            self._read()
        except CogTritonError as error:
            problem = str(error)
        except OSError as error:
            self._data_hash, problem = b"", str(InvalidArgument(_reason(error)))
        if problem and problem != self._told:
            _LOG.error("%s: %s", self.kept, problem)
        elif not problem and before != self._data_hash:
            _LOG.info(self.renewed)
        self._told = problem

    def _read(self) -> None:
        data = read_files(self.files(), self.most_bytes)
        found = hashlib.sha256()
        for name, text in data:
            found.update(b"%d %d " % (len(name), len(text)) + os.fsencode(name) + text)
        if (made := found.digest()) != self._data_hash:
            self._data_hash = made
            self.take(data)


def _reason(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return where + (error.strerror or str(error))
