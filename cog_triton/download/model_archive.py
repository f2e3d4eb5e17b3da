"""Extraction of a model's tar to a directory, atomically."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cog_triton.artifact import tar_members
from cog_triton.download import disk_space
from cog_triton.download.transfer_progress import Echo, size_text

_CHUNK = 1 << 20


def unpack(tar: Path, target: Path, name: str, check: Callable[[Path], object], echo: Echo) -> Path:
    """Unpack `tar` to `target`, which must not be there. A sole top directory is left out.

    The caller holds the lock of `target`: leftovers of a killed process are removed.

    Args:
        name: what errors and progress call it.
        check: gets the unpacked directory before it gets its name; raises to refuse it.

    Raises:
        EngineCorrupt: no readable tar, or an unsafe member; names it.
        DiskFull: there is no room for a member; names it.
    """
    with disk_space.coded_errors(target, name):
        target.parent.mkdir(parents=True, exist_ok=True)
        for killed in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(killed)
        size = tar.stat().st_size
        disk_space.require(target.parent, size, f"{name}, unpacked,")
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            echo(f"[download] {name}: unpacking {size_text(size)}")
            for member in tar_members.read(tar):
                path = fresh / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                if member.content is not None:
                    disk_space.require(fresh, member.size, f"{name}: member {member.name!r}")
                    with path.open("xb") as file:
                        shutil.copyfileobj(member.content, file, _CHUNK)
                elif member.link is not None:
                    path.symlink_to(member.link)
                else:
                    path.mkdir(exist_ok=True)
            top = _top(fresh)
            check(top)
            top.chmod(0o755)
            top.rename(target)
            disk_space.sync_directory(target.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def _top(directory: Path) -> Path:
    """`directory`, or the one in it that holds everything, however deep."""
    while True:
        entries = list(directory.iterdir())
        if len(entries) != 1 or entries[0].is_symlink() or not entries[0].is_dir():
            return directory
        directory = entries[0]
