"""Sandbox of a server: /dev/shm, a disk and a control group of its own, to be filled and stalled.

The mounts are in a namespace of the server's; the machine outside sees none of them. Without the
right to make one the server runs as it is, and the faults that need the sandbox are left out.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults import cgroups

_SHM_MB, _DISK_MB = 512, 1024


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where a server keeps its files; `group` is its control group, None where there is none."""

    work_dir: Path
    is_isolated: bool
    group: Path | None

    def command(self, words: list[str], binds: Mapping[Path, Path]) -> list[str]:
        """The command line that runs `words` within it, as the same process.

        `binds` are directories that stand in place of others there.
        """
        steps: list[str] = ["ulimit -c 0"]
        # Whatever ends the run, even SIGKILL, ends the parent, and so all below it.
        space = ["setpriv", "--pdeathsig=KILL"]
        if self.group is not None:
            steps.append(f"echo $$ > {self.group}/cgroup.procs")
        if self.is_isolated:
            space += ["unshare", "--mount", "--propagation", "private"]
            steps.append(f"mount -t tmpfs -o size={_SHM_MB}m tmpfs /dev/shm")
            steps += [f"mount --bind {here} {there}" for here, there in binds.items()]
            steps.append(f"mount -o loop {_image(self.work_dir)} {self.work_dir}")
        script = "\n".join([*steps, 'exec "$@"'])
        return [*space, "sh", "-euc", script, "sh", *words]


@functools.cache
def lacking() -> str | None:
    """Why no server can have mounts of its own here; None if it can."""
    tools = ("unshare", "setpriv", "mount", "mkfs.ext4")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "not root"
    tried = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "x", "/mnt"],
        capture_output=True,
        text=True,
    )
    return (tried.stderr.strip() or "no mount namespaces") if tried.returncode else None


@contextmanager
def sandbox(directory: Path) -> Iterator[Sandbox]:
    """A sandbox below `directory`, which is a new one."""
    work_dir = directory / "work"
    work_dir.mkdir()
    with ExitStack() as stack:
        group = None
        if cgroups.lacking("cgroup.freeze") is None:
            group = stack.enter_context(cgroups.group(directory.name, "cgroup.freeze"))
        if not (isolated := lacking() is None):
            yield Sandbox(work_dir, isolated, group)
            return
        image = _image(work_dir)
        with image.open("wb") as file:
            file.truncate(_DISK_MB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        yield Sandbox(work_dir, isolated, group)


def _image(work_dir: Path) -> Path:
    return work_dir.with_suffix(".ext4")
