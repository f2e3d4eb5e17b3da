"""Files to prune, and what is compared of them before and after."""

from __future__ import annotations

import os
from pathlib import Path

from fatbins import Image, container, cubin, library

from cog_triton_prune.command import Result
from cog_triton_prune.prune_file import Options, Outcome

FATBIN = container(*(Image(number=number) for number in (80, 86, 90))) * 3
LIBRARY = library(FATBIN, cubin(80) + cubin(90))
FREED = 3 * 2 * len(Image().pack())
OLD_NS = 1_500_000_000_123_456_789
SM90 = Options((90,))


def write(path: Path, data: bytes = LIBRARY, mode: int = 0o750) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    return path


def actions(result: Result) -> dict[str, str]:
    return {outcome.path.name: outcome.action for outcome in result.outcomes}


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below `root`: kind or content, mode, time and number of links."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: object = "directory"
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        facts = (status.st_mode, status.st_mtime_ns, status.st_nlink)
        found[str(path.relative_to(root))] = (content, *facts)
    return found


def only(result: Result) -> Outcome:
    (outcome,) = result.outcomes
    return outcome
