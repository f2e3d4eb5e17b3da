"""Tar headers as Go writes them, byte for byte, for the digests of nix2container."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

BLOCK = 512
END = bytes(2 * BLOCK)


@dataclass(kw_only=True)
class Entry:
    """Fields of a header; `type` is ``0`` for a file, ``2`` for a link, ``5`` for a directory."""

    name: str
    type: str
    mode: int
    size: int = 0
    linkname: str = ""
    uid: int = 0
    gid: int = 0
    mtime: int = 1


def header(entry: Entry) -> bytes:
    """USTAR header, else a PAX header and a shortened USTAR one."""
    records = {}
    prefix, name = _split(entry.name)
    if name is None:
        records["path"] = entry.name
        prefix, name = "", entry.name
    if not entry.linkname.isascii() or len(entry.linkname) > 100:
        records["linkpath"] = entry.linkname
    if entry.size >= 8**11:
        records["size"] = str(entry.size)
    extended = b""
    if records:
        data = b"".join(_record(key, value) for key, value in sorted(records.items()))
        directory, base = posixpath.split(entry.name)
        title = posixpath.join(directory, "PaxHeaders.0", base)
        about = Entry(name=_ascii(title)[:100].rstrip("/"), type="x", mode=0, size=len(data))
        about.mtime = 0
        extended = _block(about, "", about.name, owner="") + data + bytes(-len(data) % BLOCK)
    return extended + _block(entry, prefix, _ascii(name)[:100])


def _split(name: str) -> tuple[str, str | None]:
    """Prefix and name of USTAR; None for a name that does not fit."""
    if name.isascii() and len(name) <= 100:
        return "", name
    at = name[:156].rfind("/")
    if not name.isascii() or at <= 0 or at > 155 or not 0 < len(name) - at - 1 <= 100:
        return "", None
    return name[:at], name[at + 1 :]


def _ascii(text: str) -> str:
    return "".join(char for char in text if char.isascii())


def _record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def _block(entry: Entry, prefix: str, name: str, owner: str = "root") -> bytes:
    def text(value: str, length: int) -> bytes:
        return value.encode()[:length].ljust(length, b"\0")

    def octal(value: int, length: int) -> bytes:
        return (
            f"{value:0{length - 1}o}".encode() + b"\0"
            if value < 8 ** (length - 1)
            else bytes(length)
        )

    before = text(name, 100) + octal(entry.mode, 8) + octal(entry.uid, 8) + octal(entry.gid, 8)
    before += octal(entry.size, 12) + octal(entry.mtime, 12)
    device = octal(0, 8) * 2 if owner else bytes(16)
    after = entry.type.encode() + text(_ascii(entry.linkname), 100) + b"ustar\x0000"
    after += text(owner, 32) * 2 + device + text(prefix, 155) + bytes(12)
    total = sum(before) + 8 * ord(" ") + sum(after)
    return before + f"{total:06o}\0 ".encode() + after
