"""``cog-triton prune``: finds files, copies them if asked, and prunes them in parallel."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.progress import track

from cog_triton.errors import DiskFull, InvalidArgument
from cog_triton.system.terminal import err
from cog_triton_prune import elf
from cog_triton_prune.prune_file import Options, Outcome, from_os, prune, shown


@dataclass(frozen=True)
class Result:
    """Outcomes of files with device code, by path; `others` counts files without any.

    `links_out` counts links out of the given trees, whose files were left alone.
    """

    options: Options
    outcomes: tuple[Outcome, ...]
    others: int
    links_out: int


def run(
    paths: Sequence[Path],
    options: Options,
    output: Path | None = None,
    jobs: int | None = None,
) -> Result:
    """Prune every shared object at and below `paths`, in place or in copies below `output`.

    An interrupt, SIGTERM included, lets the files in hand be finished and then ends the rest;
    no half-made file or copy is left.

    Raises:
        InvalidArgument: a path or `output` cannot be used; nothing was done then.
        DiskFull: no space for the copies.
    """
    targets = _destinations(paths, output) if output else {}
    found = _find(paths)
    with _terminable():
        if not targets or options.dry_run:
            return _prune(*found, options, jobs)
        try:
            for path, target in targets.items():
                _copy(path, target)
            return _prune(*_find([*targets.values()]), options, jobs)
        except BaseException:
            for target in targets.values():
                if target.is_dir():
                    shutil.rmtree(target)
                else:
                    target.unlink(missing_ok=True)
            raise


def _prune(files: list[list[Path]], links_out: int, options: Options, jobs: int | None) -> Result:
    outcomes: list[Outcome] = []
    with (
        _directory_times({name.parent for names in files for name in names}),
        # What takes long here, copying, runs without the interpreter's lock.
        ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool,
    ):
        futures = [pool.submit(prune, path, names, options) for path, *names in files]
        try:
            finished = track(
                as_completed(futures),
                "Pruning",
                len(files),
                console=err,
                transient=True,
                disable=not err.is_terminal,
            )
            for future in finished:
                if outcome := future.result():
                    outcomes.append(outcome)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    outcomes.sort(key=lambda outcome: outcome.path)
    return Result(options, tuple(outcomes), len(files) - len(outcomes), links_out)


def _find(paths: Sequence[Path]) -> tuple[list[list[Path]], int]:
    """All regular files at and below `paths`, each with its hard links; how many links lead out.

    A symbolic link is followed only if it is one of `paths`.

    Raises:
        InvalidArgument: a path is not there or cannot be read, or is a file but no shared object.
    """
    by_identity: dict[tuple[int, int], list[Path]] = {}
    links: list[Path] = []
    for given in paths:
        try:
            for path in _below(given):
                status = path.lstat()
                if stat.S_ISLNK(status.st_mode):
                    links.append(path)
                elif stat.S_ISREG(status.st_mode):
                    names = by_identity.setdefault((status.st_dev, status.st_ino), [])
                    if path not in names:
                        names.append(path)
        except OSError as error:
            raise from_os(error, Path(error.filename) if given.exists() else given) from error
    # A link that leads nowhere leads to no device code.
    led_to = [link.stat() for link in links if link.is_file()]
    out = sum((status.st_dev, status.st_ino) not in by_identity for status in led_to)
    return list(by_identity.values()), out


def _below(given: Path) -> list[Path]:
    root = given.resolve(strict=True)
    if root.is_dir():
        tree = os.walk(root, onerror=_raise)
        return sorted(Path(directory, name) for directory, _, names in tree for name in names)
    if root.is_file() and elf.is_loadable(root):
        return [root]
    raise InvalidArgument(
        f"PATH='{given}': must be a directory, or a 64-bit little-endian ELF file that is a"
        " shared object or a program"
    )


def _raise(error: OSError) -> NoReturn:
    raise error


def _destinations(paths: Sequence[Path], output: Path) -> dict[Path, Path]:
    """Where the copy of each path is to be: under its own name in `output`."""
    copies: dict[Path, Path] = {}
    for path in paths:
        target = output.resolve() / Path(os.path.normpath(path.absolute())).name
        if os.path.lexists(target) or target in copies.values():
            raise InvalidArgument(f"OUTPUT='{output}': {target} exists already, or is meant twice")
        if target.is_relative_to(path.resolve()):
            raise InvalidArgument(f"OUTPUT='{output}': lies in '{path}', which is to be copied")
        copies[path] = target
    return copies


def _copy(path: Path, target: Path) -> None:
    """Copy a tree with its links, owners, permissions and times."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["cp", "-a", "--", str(path.resolve()), str(target)]
    done = subprocess.run(command, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[:1]
        full = said and said[0].endswith(os.strerror(errno.ENOSPC))
        raise (DiskFull if full else InvalidArgument)(f"PATH='{shown(path)}': {' '.join(said)}")


@contextmanager
def _directory_times(directories: set[Path]) -> Iterator[None]:
    """Restore the times of directories in which files are replaced."""
    before = {directory: directory.stat() for directory in directories}
    try:
        yield
    finally:
        for directory, status in before.items():
            if directory.stat().st_mtime_ns != status.st_mtime_ns:
                # Whoever may replace a file need not own its directory.
                with suppress(PermissionError):
                    os.utime(directory, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise SystemExit on SIGTERM within the block, so that it cleans up."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
