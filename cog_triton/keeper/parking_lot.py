"""Parking lot of one user: keepers that outlive servers, each in a directory of its own.

The directory ``parked`` of the work directory is for its user alone. Sockets are in Linux's
abstract namespace, where both ends check that the other is the same user.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cog_triton.errors import InvalidArgument, TritonStartFailed
from cog_triton.keeper.lot_messages import Describe, Description, End, Keep
from cog_triton.system import local_socket
from cog_triton.system.detached import DetachedProgram, start
from cog_triton.system.secret_variables import without_secrets

_PROGRAM = "cog_triton.keeper.lot_keeper"
_GRACE_S = 12.0
_ANSWER_S = 5.0
_START_S = 30.0
_POLL_S = 0.02
_LOG = "keeper.log"


def socket_name(name: str) -> str:
    """Socket of the keeper `name` of a parking lot."""
    return f"cog-triton-keeper-{name}"


@dataclass(frozen=True, slots=True)
class LotEntry:
    """Keeper of a parking lot: its name, directory, and what it holds, None if it is silent."""

    name: str
    directory: Path
    description: Description | None


class ParkingLot:
    """Keepers below the work directory of one user."""

    def __init__(self, work_dir: Path) -> None:
        self.directory = work_dir.resolve() / "parked"

    def open(self) -> str:
        """Start a keeper, which ends with this process unless it has an engine; its name.

        Raises E2106 if it does not start.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        name = secrets.token_hex(4)
        directory = self.directory / name
        directory.mkdir(mode=0o700)
        command = [sys.executable, "-m", _PROGRAM, socket_name(name), str(directory)]
        start(
            [*command, str(os.getpid())],
            without_secrets(os.environ),
            directory / _LOG,
            _GRACE_S,
        )
        deadline = time.monotonic() + _START_S
        while self.describe(name) is None:
            if time.monotonic() > deadline:
                said = (directory / _LOG).read_text("utf-8", "replace")
                raise TritonStartFailed(f"the keeper of a parked engine does not start:\n{said}")
            time.sleep(_POLL_S)
        return name

    def entries(self) -> Iterator[LotEntry]:
        """All keepers, the newest first; what dead ones have left is removed."""
        if not self.directory.is_dir():
            return
        for directory in sorted(self.directory.iterdir(), key=_age):
            name = directory.name
            try:
                local_socket.connect(socket_name(name)).close()
            except OSError:
                if _age(directory) > _START_S:
                    shutil.rmtree(directory, ignore_errors=True)
                continue
            description = self.describe(name)
            yield LotEntry(name, directory, description)

    def of_server(self, server: str) -> list[LotEntry]:
        """Keepers that the server `server` has or had last, and the one that it has started."""
        return [
            entry
            for entry in self.entries()
            if entry.description is not None and server == (entry.description.server or entry.name)
        ]

    def describe(self, name: str) -> Description | None:
        """What a keeper holds; None where it is gone, or silent."""
        return self._ask(name, Describe())

    def keep(self, name: str) -> None:
        """Have a keeper park its engine once its server has hung up."""
        self._ask(name, Keep(os.getpid()))

    def drop(self, entry: LotEntry) -> None:
        """End a keeper and its engine; what does not end in time is killed.

        Raises E1005 while a server has it.
        """
        if entry.description is not None and entry.description.state == "serving":
            raise InvalidArgument(
                f"{entry.name}: a server has this engine; stop that server instead"
            )
        try:
            connection = local_socket.connect(socket_name(entry.name))
        except OSError:
            return
        with connection:
            root = entry.description.root if entry.description else _root_of(connection)
            program = DetachedProgram(root)
            try:
                connection.send(End())
                if not program.wait(_GRACE_S + 3):
                    program.kill()
            finally:
                program.close()
        shutil.rmtree(entry.directory, ignore_errors=True)

    def _ask(self, name: str, message: Any) -> Description | None:
        try:
            with local_socket.connect(socket_name(name)) as connection:
                connection.send(message)
                if connection.poll(_ANSWER_S):
                    answer = connection.recv()
                    return answer if isinstance(answer, Description) else None
        except (OSError, EOFError):
            pass
        return None


def _age(directory: Path) -> float:
    """Seconds since a directory was made or changed."""
    try:
        return time.time() - directory.stat().st_mtime
    except OSError:
        return 0.0


def _root_of(keeper: Connection) -> int:
    """Process id of the root of a keeper that does not tell it."""
    stat = Path(f"/proc/{local_socket.peer_pid(keeper)}/stat").read_text("utf-8", "replace")
    return int(stat.rpartition(")")[2].split()[1])
