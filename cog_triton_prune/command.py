"""``cog-triton prune``: finds files, copies them if asked, and prunes them in parallel."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cog_triton_prune import file_search, tree_copies
from cog_triton_prune.prune_file import Options, Outcome, prune

Progress = Callable[[int, int], None]


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
    progress: Progress = lambda done, of: None,
) -> Result:
    """Prune every shared object at and below `paths`, in place or in copies below `output`.

    An interrupt, SIGTERM included, lets the files in hand be finished and then ends the rest;
    no half-made file or copy is left.

    Raises:
        InvalidArgument: a path or `output` cannot be used; nothing was done then.
        DiskFull: no space for the copies.
    """
    targets = tree_copies.destinations(paths, output) if output else {}
    found = file_search.find(paths)
    if not targets or options.dry_run:
        return _prune(found, options, jobs, progress)
    with _terminable():
        try:
            tree_copies.make(targets)
            return _prune(file_search.find(list(targets.values())), options, jobs, progress)
        except BaseException:
            tree_copies.remove(targets)
            raise


def _prune(
    found: file_search.Found, options: Options, jobs: int | None, progress: Progress
) -> Result:
    outcomes: list[Outcome] = []
    total = len(found.files)
    with (
        _terminable(),
        _directory_times({name.parent for names in found.files for name in names}),
        # What takes long here, copying, runs without the interpreter's lock.
        ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool,
    ):
        futures = [pool.submit(prune, path, names, options) for path, *names in found.files]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                outcome = future.result()
                if outcome:
                    outcomes.append(outcome)
                progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    outcomes.sort(key=lambda outcome: outcome.path)
    return Result(options, tuple(outcomes), total - len(outcomes), found.links_out)


@contextmanager
def _directory_times(directories: set[Path]) -> Iterator[None]:
    """Restore the times of directories in which files are replaced."""
    before = {directory: directory.stat() for directory in directories}
    try:
        yield
    finally:
        for directory, status in before.items():
            now = directory.stat()
            if now.st_mtime_ns != status.st_mtime_ns:
                # Whoever may replace a file need not own its directory.
                with suppress(PermissionError):
                    os.utime(directory, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise SystemExit on SIGTERM within the block, so that it cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
