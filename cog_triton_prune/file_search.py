"""File search: every regular file at and below the given paths, once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cog_triton.errors import InvalidArgument
from cog_triton_prune.prune_file import from_os, is_loadable


@dataclass
class Found:
    """Files found; each is a path followed by its hard links.

    `links_out` counts symbolic links in a tree to files outside of it, which are left alone.
    """

    files: list[list[Path]] = field(default_factory=list)
    links_out: int = 0


def find(paths: Sequence[Path]) -> Found:
    """All regular files at and below `paths`; a symbolic link is followed only if it is one.

    Raises:
        InvalidArgument: a path is not there or cannot be read, or is a file but no shared object.
    """
    by_identity: dict[tuple[int, int], list[Path]] = {}
    links: list[Path] = []
    for given in paths:
        try:
            for path in _files(given):
                if path.is_symlink():
                    links.append(path)
                    continue
                status = path.stat()
                names = by_identity.setdefault((status.st_dev, status.st_ino), [])
                if path not in names:
                    names.append(path)
        except OSError as error:
            raise from_os(error, Path(error.filename) if given.exists() else given) from error
    out = 0
    for link in links:
        # A link that leads nowhere leads to no device code.
        if link.is_file():
            status = link.stat()
            out += (status.st_dev, status.st_ino) not in by_identity
    return Found(list(by_identity.values()), out)


def _files(given: Path) -> Iterator[Path]:
    root = given.resolve(strict=True)
    if root.is_dir():
        yield from _below(root)
    elif root.is_file() and is_loadable(root):
        yield root
    else:
        raise InvalidArgument(
            f"PATH='{given}': must be a directory, or a 64-bit little-endian ELF file that is a"
            " shared object or a program"
        )


def _below(root: Path) -> Iterator[Path]:
    with os.scandir(root) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path))
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield Path(entry.path)
