"""Workspace: a work directory for each config, beside the models that builds share.

``<root>/builds/<fingerprint of the config>`` and ``<root>/models``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cog_triton.errors import DiskFull, InvalidArgument
from cog_triton.system import file_lock

Echo = Callable[[str], None]
"""Gets each line of progress."""
LOCK = ".lock"


class Workspace:
    """The directories below `root`; none is made before it is needed."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))  # unlike resolve, it accepts links in a loop
        self.models = self.root / "models"

    def of(self, config: str) -> Path:
        """The work directory of the config with this fingerprint."""
        return self.root / "builds" / config

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
    def turn(self, work_dir: Path, echo: Echo) -> Iterator[None]:
        """Lock `work_dir` for one build; waits for one that runs in it, and says so."""
        text = "[wait] another build of this config is running: this one goes on when it ends"
        with file_lock.waiting(work_dir / LOCK, lambda: echo(text)):
            yield

    @contextlib.contextmanager
    def step_turn(self, name: str, fingerprint: str, echo: Echo) -> Iterator[None]:
        """Lock a step, whichever configs have it, so that builds at once do not run it twice."""
        text = f"[{name}] another build is running the same step: waiting for what it writes"
        with file_lock.waiting(self.root / "locks" / fingerprint, lambda: echo(text)):
            yield

    def others(self, own: Path) -> list[Path]:
        """The work directories of other configs."""
        return [path for path in sorted(own.parent.glob("*")) if path != own and path.is_dir()]

    def remove_others(self, own: Path) -> None:
        """Remove the work directories of other configs, unless one is in use."""
        for other in self.others(own):
            with contextlib.suppress(InvalidArgument), locked(other):
                shutil.rmtree(other)

    def clean(self, config: str | None = None) -> int:
        """Remove the work directory of `config` (its fingerprint), or else all, and all models.

        Returns:
            How many bytes that was.

        Raises:
            InvalidArgument: a build is running in one of them; nothing was removed.
        """
        builds = self.root / "builds"
        places = sorted(builds.glob("*")) if config is None else [self.of(config)]
        freed = 0
        with contextlib.ExitStack() as stack:
            for place in places:
                if place.is_dir():
                    stack.enter_context(locked(place))
            for place in [*places, *([] if config is not None else [self.models])]:
                freed += _size(place)
                shutil.rmtree(place, ignore_errors=True)
        return freed


def existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    return next(place for place in (path, *path.parents) if place.is_dir())


@contextlib.contextmanager
def locked(work_dir: Path) -> Iterator[None]:
    """Lock `work_dir` against builds, without waiting for one.

    Raises:
        InvalidArgument: a build is running in it.
    """
    descriptor = file_lock.attempt(work_dir / LOCK)
    if descriptor is None:
        raise InvalidArgument(f"work_dir {work_dir}: a build is running in it")
    try:
        yield
    finally:
        os.close(descriptor)


def _size(root: Path) -> int:
    """Bytes on disk of the files below `root`; links are not followed."""
    paths = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    inodes = {(s.st_dev, s.st_ino): s.st_blocks * 512 for s in (path.stat() for path in paths)}
    return sum(inodes.values())
