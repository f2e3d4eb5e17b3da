"""Pruning of one file: planned on a memory map, then replaced atomically."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from cog_triton.errors import CogTritonError, DiskFull, InvalidArgument
from cog_triton_prune import elf, licences, zero_edits
from cog_triton_prune.prune_plan import EMPTY, Plan, make


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
    plan: Plan = EMPTY
    reason: str = ""
    error: CogTritonError | None = None


def prune(path: Path, names: Sequence[Path], options: Options) -> Outcome | None:
    """Prune the file at `path`, whose other hard links are `names`; None without device code.

    Nothing is raised but an interrupt: whatever a file is refused for is in the outcome, and the
    file is then as it was. One that is not to be changed need not be readable.
    """
    reasons = [] if options.all_licences else [licences.refusal(name) for name in [path, *names]]
    closed = reasons[0] if reasons and None not in reasons else None
    try:
        status = path.stat()
        if not elf.is_loadable(path):
            return None
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            plan = make(view, options.sms, options.embedded)
        if not plan.has_device_code:
            return None
        if closed:
            return Outcome(path, "skipped", status.st_size, plan, closed)
        if not plan.edits:
            return Outcome(path, "unchanged", status.st_size, plan)
        if not options.dry_run:
            _replace(path, names, plan)
        unseen = status.st_nlink - 1 - len(names)
        note = f"{unseen} other hard links keep the file as it was" if unseen else ""
        return Outcome(path, "pruned", status.st_size, plan, note)
    except CogTritonError as error:
        if closed:
            return Outcome(path, "skipped", status.st_size, reason=closed)
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


def _replace(path: Path, names: Iterable[Path], plan: Plan) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    made = [temporary]
    try:
        with os.fdopen(descriptor, "r+b") as file:
            shutil.copyfile(path, temporary)
            with mmap.mmap(file.fileno(), 0) as view:
                zero_edits.apply(view, plan.edits)
                view.flush()
            os.fsync(file.fileno())
        status = path.stat()
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(temporary, status.st_uid, status.st_gid)
        shutil.copystat(path, temporary)
        for other in names:
            made.append(other.with_name(f".{other.name}.{uuid4().hex}"))
            os.link(temporary, made[-1])
            made[-1].replace(other)
        temporary.replace(path)
    except BaseException:
        for left in made:
            left.unlink(missing_ok=True)
        raise
