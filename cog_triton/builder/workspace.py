"""Workspace: a work directory for each config, beside the models that builds share.

``<root>/builds/<fingerprint of the config>`` and ``<root>/models``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from cog_triton.builder.config import BuildConfig
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

    def of(self, config: BuildConfig) -> Path:
        """The work directory of `config`; time limits make no difference."""
        value = yaml.safe_load(config.to_yaml())
        for part in (value, *(value[name] for name, _ in config.steps())):
            part.pop("timeout", None)
        digest = hashlib.sha256(yaml.safe_dump(value).encode()).hexdigest()
        return self.root / "builds" / digest[:16]

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
                free = shutil.disk_usage(self._existing()).free
                raise DiskFull(f"{error}; {free / 1e6:.1f} MB free in {self.root}") from error
            if str(error.filename or "").startswith(str(self.root)):
                raise InvalidArgument(f"work_dir {self.root}: {error}") from error
            raise

    def _existing(self) -> Path:
        return next(path for path in (self.root, *self.root.parents) if path.is_dir())

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

    def clean(self, config: BuildConfig | None = None) -> int:
        """Remove the work directory of `config`, or else of all configs, and all models.

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


def point_at(link: Path, model: Path) -> None:
    """Make `link` name the model; nothing is copied.

    Raises:
        InvalidArgument: something else has the link's name.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise InvalidArgument(f"work_dir: {link} is there and is not this build's link")
    link.symlink_to(model)


def _size(root: Path) -> int:
    """Bytes on disk of the files below `root`; links are not followed."""
    paths = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    inodes = {(s.st_dev, s.st_ino): s.st_blocks * 512 for s in (path.stat() for path in paths)}
    return sum(inodes.values())


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
