"""Workspace of builds: stages by what decides their outputs, beside the models that builds share.

``<root>/steps/<key of a stage>/`` is the output of a stage, and complete: a stage writes beside it,
and its directory is renamed at the end. ``<root>/builds/<fingerprint of a config>.json`` lists the
stages of its last build, ``<root>/logs`` has the lines of their processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from cog_triton.errors import DiskFull, InvalidArgument
from cog_triton.system import file_lock, isolated_python
from cog_triton.system.atomic_write import write_json

Echo = Callable[[str], None]
"""Gets each line of progress."""
PART = ".part"
_USED_S = 7 * 86_400.0  # outputs that were used since then stay, unless a limit is given


@dataclass(frozen=True)
class Stage:
    """A part of a build: `run` fills the empty directory that it is given.

    `inputs` is a JSON value of all that decides the output, with the keys of the stages before it.
    """

    name: str
    inputs: Any
    run: Callable[[Path], None]

    @cached_property
    def key(self) -> str:
        """SHA-256 of the inputs, in hexadecimal."""
        return digest(self.inputs)


class Workspace:
    """The directories below `root`; none is made before it is needed."""

    def __init__(self, root: Path, *, cache: bool = True) -> None:
        """`cache` is False to run every stage again."""
        self.root = Path(os.path.realpath(root))  # unlike resolve, it accepts links in a loop
        self.models, self.cache = self.root / "models", cache
        self._steps, self._builds = self.root / "steps", self.root / "builds"

    def output(self, stage: Stage) -> Path:
        """The directory that the stage makes, or has made."""
        return self._steps / stage.key

    def log(self, name: str, directory: Path) -> Path:
        """The file for the lines of a process of the stage that runs in `directory`."""
        return self.root / "logs" / f"{name}-{directory.name[:12]}.log"

    @contextlib.contextmanager
    def coded(self) -> Iterator[None]:
        """Turn errors of the file system below the root into coded ones.

        Raises:
            DiskFull: no space or quota is left.
            InvalidArgument: something below the root cannot be read or written.
        """
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(existing(self.root)).free
                raise DiskFull(f"{error}; {free / 1e6:.1f} MB free in {self.root}") from error
            if str(error.filename or "").startswith(str(self.root)):
                raise InvalidArgument(f"work_dir {self.root}: {error}") from error
            raise

    @contextlib.contextmanager
    def in_use(self) -> Iterator[IO[str]]:
        """Context of a build, in which no other process removes outputs; yields the lock."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield lock

    def run(self, stage: Stage, echo: Echo) -> Path:
        """The output of the stage, which runs unless it did, here or in another build at once."""
        place = self.output(stage)
        if self.cache and place.is_dir():
            echo(f"[{stage.name}] already done")
            return place
        wait = f"[{stage.name}] another build is running the same step: waiting for its output"
        with file_lock.waiting(place.with_suffix(".lock"), lambda: echo(wait)):
            if self.cache and place.is_dir():
                echo(f"[{stage.name}] already done by another build")
                return place
            part = place.with_suffix(PART)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                stage.run(part)
                shutil.rmtree(part / isolated_python.LINKS, ignore_errors=True)
                _sync(part)
                shutil.rmtree(place, ignore_errors=True)
                part.rename(place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return place

    def record(self, config: str, stages: Sequence[Stage], packed: object = None) -> None:
        """Record that the config with this fingerprint uses these stages now.

        Args:
            packed: what the last stage was packed to, see `packed`.
        """
        keys = [stage.key for stage in stages]
        write_json(self._record(config), {"stages": keys, "packed": packed})

    def packed(self, config: str) -> object:
        """The `packed` of the last `record`; None if there is none."""
        return _read(self._record(config)).get("packed")

    def prune(self, lock: IO[str], config: str, most: int | None) -> None:
        """Remove outputs, the longest unused first, until all have `most` bytes together.

        Those of `config` stay, which was just built, and all if another build is running. If `most`
        is None, it is twice the bytes of `config`'s, and what was used in the last 7 days stays.

        Args:
            lock: that of `in_use`.
        """
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old_layout = [path for path in self._builds.glob("*") if path.is_dir()]  # that of 0.4
            for dead in [*self._steps.glob(f"*{PART}"), *old_layout]:
                shutil.rmtree(dead)
            uses, own = self._uses(), _read(self._record(config)).get("stages", ())
            outputs = [path for path in self._steps.glob("*") if path.is_dir()]
            outputs.sort(key=lambda path: uses.get(path.name, 0.0))
            newest = [path for path in outputs if path.name in own]
            limit = 2 * _size(newest) if most is None else most
            since = time.time() - _USED_S if most is None else float("inf")
            for path in [p for p in outputs if p not in newest and uses.get(p.name, 0.0) < since]:
                if _size(outputs) <= limit:
                    break
                shutil.rmtree(path)
                outputs.remove(path)

    def _uses(self) -> dict[str, float]:
        """When each key was last used, by the records."""
        uses: dict[str, float] = {}
        for record in sorted(self._builds.glob("*.json"), key=lambda p: p.stat().st_mtime):
            uses |= dict.fromkeys(_read(record).get("stages", ()), record.stat().st_mtime)
        return uses

    def clean(self, config: str | None = None) -> int:
        """Remove what only builds of `config` (its fingerprint) use, or else all, and all models.

        Returns:
            How many bytes that was.

        Raises:
            InvalidArgument: a build is running here; nothing was removed.
        """
        if not self.root.is_dir():
            return 0
        with self.in_use() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidArgument(f"work_dir {self.root}: a build is running in it") from None
            places = [self._steps, self._builds, self.root / "logs", self.models]
            if config is not None:
                record = self._record(config)
                keys = _read(record).get("stages", ())
                record.unlink(missing_ok=True)
                uses = self._uses()
                places = [self._steps / key for key in keys if key not in uses]
            freed = _size(places)
            for place in places:
                shutil.rmtree(place, ignore_errors=True)
        return freed

    def _record(self, config: str) -> Path:
        return self._builds / f"{config}.json"


def existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    return next(place for place in (path, *path.parents) if place.is_dir())


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make `target` the file `source`, without a second copy of its bytes if one disk has both."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or it has no hard links
        shutil.copy2(source, target)


def listing(root: Path) -> list[list[Any]]:
    """Name, size and time of each file below `root`, sorted."""
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return [[str(path.relative_to(root)), s.st_size, s.st_mtime_ns] for path, s in files]


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read(record: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(record.read_text("utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _sync(root: Path) -> None:
    """Write the files below `root` to the disk: once it is renamed, nothing checks them again."""
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _size(roots: Sequence[Path]) -> int:
    """Bytes on disk of the files below `roots`; links are not followed."""
    found = [path.lstat() for root in roots for path in root.rglob("*") if path.is_file()]
    return sum({(s.st_dev, s.st_ino): s.st_blocks * 512 for s in found}.values())
