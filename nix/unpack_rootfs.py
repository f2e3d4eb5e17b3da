"""Root file system of a container, from a tar on stdin, as a Nix build may write it.

    crane export REF - | python unpack_rootfs.py DIRECTORY

The store keeps content, symbolic links and the executable bit; a build may set no more than that:
its seccomp filter refuses setuid and setgid bits, and a build user owns nothing but its own files.
Devices and pipes, which no store path can hold, are left out, each with a line.
"""

from __future__ import annotations

import os
import stat
import sys
import tarfile
from pathlib import Path
from typing import IO

_BUFFER = 1 << 20


def unpack(stream: IO[bytes], directory: Path) -> None:
    """Unpack the tar in `stream` into `directory`, which is to be made."""
    directory.mkdir(parents=True)
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_BUFFER, copybufsize=_BUFFER) as archive:
        # The content is pinned by hash: an absolute link is what the container has.
        archive.extraction_filter = staticmethod(lambda member, _: member)  # type: ignore[assignment]
        for member in archive:
            archive.members = []  # else all of some 300,000 are kept
            member.name = member.name.lstrip("/")
            if member.isdev():
                print(f"{member.name}: no file, directory or link: left out", file=sys.stderr)
            elif member.islnk():
                target = directory / member.linkname.lstrip("/")
                os.link(target, directory / member.name, follow_symlinks=False)
            else:
                archive.extract(member, directory, set_attrs=False)
                if member.isreg() and member.mode & stat.S_IXUSR:
                    (directory / member.name).chmod(0o755)


if __name__ == "__main__":
    unpack(sys.stdin.buffer, Path(sys.argv[1]))
