"""Copies of directory trees, as by `cp -a`, for pruning with --output."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cog_triton.errors import InvalidArgument
from cog_triton_prune.prune_file import from_os, keep_metadata


def destinations(paths: Sequence[Path], output: Path) -> dict[Path, Path]:
    """Destination of each path: under its own name in `output`.

    Raises:
        InvalidArgument: it would lie in its original, or where something is already.
    """
    copies: dict[Path, Path] = {}
    for path in paths:
        target = output.resolve() / Path(os.path.normpath(path.absolute())).name
        if os.path.lexists(target) or target in copies.values():
            raise InvalidArgument(f"OUTPUT='{output}': {target} exists already, or is meant twice")
        if target.is_relative_to(path.resolve()):
            raise InvalidArgument(f"OUTPUT='{output}': lies in '{path}', which is to be copied")
        copies[path] = target
    return copies


def make(copies: Mapping[Path, Path]) -> None:
    """Copy each path to its destination: links as links, with owners, permissions and times.

    Raises:
        CogTritonError: a file cannot be copied; `remove` takes back what was.
    """
    seen: dict[tuple[int, int], Path] = {}
    for path, target in copies.items():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(path.resolve(), target, seen)
        except OSError as error:
            raise from_os(error, Path(error.filename or path)) from error


def remove(copies: Mapping[Path, Path]) -> None:
    """Remove the copies, complete or not."""
    for target in copies.values():
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _copy(source: Path, target: Path, seen: dict[tuple[int, int], Path]) -> None:
    status = source.lstat()
    identity = (status.st_dev, status.st_ino)
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir()
        for entry in sorted(source.iterdir()):
            _copy(entry, target / entry.name, seen)
    elif identity in seen:
        target.hardlink_to(seen[identity])
        return
    elif source.is_file():
        shutil.copyfile(source, target)
        seen[identity] = target
    else:
        raise InvalidArgument(f"PATH='{source}': is a device, pipe or socket; cannot be copied")
    keep_metadata(source, target)
