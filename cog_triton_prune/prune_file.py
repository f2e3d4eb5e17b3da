"""Pruning of one file: planned on a memory map, then replaced atomically."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from cog_triton.errors import CogTritonError, DiskFull, InvalidArgument
from cog_triton_prune import elf, licences, zero_edits
from cog_triton_prune.prune_plan import Plan, make

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Options:
    """Options for every file; `sms` are the SM numbers of the GPUs."""

    sms: tuple[int, ...]
    dry_run: bool = False
    embedded: bool = False
    all_licences: bool = False
    measure: bool = False


@dataclass(frozen=True)
class Outcome:
    """Outcome for the file `path`: its plan, or the reason for none.

    `action` is "pruned" (or would be, in a dry run), "unchanged", "skipped" or "refused";
    `gzip` holds its size under gzip -1 before and after, in bytes.
    """

    path: Path
    action: str
    size: int = 0
    plan: Plan = field(default_factory=Plan)
    reason: str = ""
    gzip: tuple[int, int] | None = None
    error: CogTritonError | None = None


def prune(
    path: Path, names: Sequence[Path], options: Options, stop: threading.Event
) -> Outcome | None:
    """Prune the file at `path`, whose other hard links are `names`; None without device code.

    Nothing is raised but an interrupt: whatever a file is refused for is in the outcome, and the
    file is then as it was. One that is not to be changed need not be readable.
    """
    closed = None if options.all_licences else _skip_reason([path, *names])
    try:
        size = path.stat().st_size
        found = _plan(path, options)
        if found is None or not found.has_device_code:
            return None
        if closed:
            return Outcome(path, "skipped", size, found, closed)
        return _carry_out(path, names, found, options, stop)
    except CogTritonError as error:
        if closed:
            return Outcome(path, "skipped", size, reason=closed)
        coded = type(error)(f"{shown(path)}: {error.detail}")
    except OSError as error:
        if closed:
            return None
        coded = from_os(error, path)
    return Outcome(path, "refused", reason=str(coded), error=coded)


def from_os(error: OSError, path: Path) -> CogTritonError:
    """Coded error for an OSError about `path`."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidArgument
    return kind(f"PATH='{shown(path)}': {error.strerror or error}")


def shown(path: Path) -> str:
    """Printable text of `path`, whatever bytes are in it."""
    return os.fsencode(path).decode("utf-8", "replace")


def is_loadable(path: Path) -> bool:
    """Whether the file is a shared object or a program."""
    with path.open("rb") as file:
        return elf.is_loadable(file.read(elf.HEADER_SIZE))


def keep_metadata(source: Path, copy: Path) -> None:
    """Give `copy` the owner, permissions, extended attributes and times of `source`."""
    status = source.lstat()
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(copy, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(source, copy, follow_symlinks=False)


def _plan(path: Path, options: Options) -> Plan | None:
    with path.open("rb") as file:
        if not elf.is_loadable(file.read(elf.HEADER_SIZE)):
            return None
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            return make(view, options.sms, options.embedded)


def _carry_out(
    path: Path, names: Sequence[Path], plan: Plan, options: Options, stop: threading.Event
) -> Outcome:
    status = path.stat()
    gzip = _gzip_sizes(path, plan, stop) if options.measure else None
    if not plan.edits:
        return Outcome(path, "unchanged", status.st_size, plan, gzip=gzip)
    if not options.dry_run:
        _replace(path, names, plan)
    unseen = status.st_nlink - 1 - len(names)
    note = f"{unseen} other hard links keep the file as it was" if unseen else ""
    return Outcome(path, "pruned", status.st_size, plan, note, gzip)


def _skip_reason(names: Iterable[Path]) -> str | None:
    """Reason to skip a file with these names; None if one of them may be pruned."""
    reasons = [licences.refusal(name) for name in names]
    return None if None in reasons else reasons[0]


def _replace(path: Path, names: Iterable[Path], plan: Plan) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "r+b") as file:
            shutil.copyfile(path, temporary)
            with mmap.mmap(file.fileno(), 0) as view:
                zero_edits.apply(view, plan.edits)
                view.flush()
            os.fsync(file.fileno())
        keep_metadata(path, temporary)
        for other in names:
            _relink(other, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _relink(name: Path, target: Path) -> None:
    """Replace `name` atomically by a hard link to `target`."""
    fresh = name.with_name(f".{name.name}.{uuid4().hex}")
    os.link(target, fresh)
    try:
        fresh.replace(name)
    except BaseException:
        fresh.unlink()
        raise


def _gzip_sizes(path: Path, plan: Plan, stop: threading.Event) -> tuple[int, int]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        before = _gzip_size(view, stop)
        if not plan.edits:
            return before, before
        zero_edits.apply(view, plan.edits)
        return before, _gzip_size(view, stop)


def _gzip_size(view: mmap.mmap, stop: threading.Event) -> int:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    size = 0
    for at in range(0, len(view), _CHUNK):
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")
        size += len(packer.compress(view[at : at + _CHUNK]))
    return size + len(packer.flush())
