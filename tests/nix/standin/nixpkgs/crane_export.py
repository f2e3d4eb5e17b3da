"""Print a tree as `crane export` prints a container: names from the root on, newest layer's modes.

    python crane_export.py TREE

With what no store path can hold but a container does, in the formats that Go's archive/tar writes:
setuid and setgid files, hard links (one to a link that leads nowhere here), long names, file
capabilities, files and directories that only their owner reads or nobody, sticky directories,
devices, a pipe, owners.
"""

import io
import sys
import tarfile
from pathlib import Path

_LONG = "usr/share/" + "/".join(["long-name-of-a-directory-" + "d" * 60] * 4) + "/" + "f" * 120
_CAPABILITY = b"\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"


def _member(
    name: str, mode: int, kind: bytes = tarfile.REGTYPE, **fields: object
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.mode, made.type = mode, kind
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def _special() -> list[tuple[tarfile.TarInfo, bytes]]:
    link, device = tarfile.LNKTYPE, tarfile.CHRTYPE
    capability = {"SCHILY.xattr.security.capability": _CAPABILITY.decode("latin-1")}
    return [
        (_member("usr/bin/su", 0o4755), b"setuid"),
        (_member("usr/bin/wall", 0o2755, gid=5), b"setgid"),
        (_member("usr/bin/su.distrib", 0o4755, link, linkname="usr/bin/su"), b""),
        (_member("usr/bin/away", 0o777, tarfile.SYMTYPE, linkname="/opt/not/here"), b""),
        (_member("usr/bin/away.2", 0o777, link, linkname="usr/bin/away"), b""),
        (_member("usr/bin/ping", 0o755, pax_headers=capability), b"capability"),
        (_member("usr/local/games", 0o2775, tarfile.DIRTYPE, gid=50), b""),
        (_member("etc/shadow", 0o640, gid=42), b"shadow"),
        (_member("etc/nobody-reads", 0o000), b"mode 0"),
        (_member("etc/private", 0o500, tarfile.DIRTYPE), b""),
        (_member("etc/private/key", 0o400, uid=65534), b"key"),
        (_member("usr/share/ünïcode", 0o644), b"name"),
        (_member(_LONG, 0o644), b"long"),
        (_member("usr/share/long", 0o777, tarfile.SYMTYPE, linkname=_LONG), b""),
        (_member("dev", 0o755, tarfile.DIRTYPE), b""),
        (_member("dev/null", 0o666, device, devmajor=1, devminor=3), b""),
        (_member("dev/loop0", 0o660, tarfile.BLKTYPE, devmajor=7), b""),
        (_member("var/initctl", 0o600, tarfile.FIFOTYPE), b""),
    ]


def main(root: Path) -> None:
    """Print the tar."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            member = archive.gettarinfo(path, str(path.relative_to(root)))
            member.mode |= 0o1777 if member.name in ("tmp", "var/tmp") else 0
            if member.isreg():
                with path.open("rb") as file:
                    archive.addfile(member, file)
            else:
                archive.addfile(member)
        for member, content in _special():
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


main(Path(sys.argv[1]))
