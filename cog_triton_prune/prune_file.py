"""Pruning of one file: planned on a memory map, then replaced atomically."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from cog_triton.errors import CogTritonError, DiskFull, InvalidArgument
from cog_triton_prune import elf, licences, zero_edits
from cog_triton_prune.prune_plan import Plan, make


@dataclass(frozen=True)
class Options:
    """Options for every file; `sms` are the SM numbers of the GPUs."""

    sms: tuple[int, ...]
    dry_run: bool = False
    embedded: bool = False
    all_licences: bool = False


@dataclass(frozen=True)
class Outcome:
    """Outcome for the file `path`: its plan, or the reason for none.

    `action` is "pruned" (or would be, in a dry run), "unchanged", "skipped" or "refused".
    """

    path: Path
    action: str
    size: int = 0
    plan: Plan = field(default_factory=Plan)
    reason: str = ""
    error: CogTritonError | None = None


def prune(path: Path, names: Sequence[Path], options: Options) -> Outcome | None:
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
        return _carry_out(path, names, found, options)
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


def _carry_out(path: Path, names: Sequence[Path], plan: Plan, options: Options) -> Outcome:
    status = path.stat()
    if not plan.edits:
        return Outcome(path, "unchanged", status.st_size, plan)
    if not options.dry_run:
        _replace(path, names, plan)
    unseen = status.st_nlink - 1 - len(names)
    note = f"{unseen} other hard links keep the file as it was" if unseen else ""
    return Outcome(path, "pruned", status.st_size, plan, note)


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
