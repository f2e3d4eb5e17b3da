"""Strip symbol tables and debugging information from shared objects, in place.

python strip_symbols.py FILE...

As `strip --strip-unneeded` does, in Python alone, so that the same bytes come out wherever it runs:
what the loader maps stays as it is at the addresses where it is, and its section headers stay, for
device code is found by them. Everything else leaves the file. Other files are left alone.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
# Of the header: kind, phoff, shoff, phentsize, phnum, shentsize, shnum, shstrndx.
_FIELDS = (1, 5, 6, 9, 10, 11, 12, 13)
_ELF64 = b"\x7fELF\x02\x01"
_LOAD, _SHARED, _NOBITS, _ALLOCATED = 1, 3, 8, 2


@dataclass(frozen=True)
class Segment:
    """A program header; field names as in elf.h."""

    type: int
    flags: int
    offset: int
    vaddr: int
    paddr: int
    filesz: int
    memsz: int
    align: int


@dataclass(frozen=True)
class Section:
    """A section header; field names as in elf.h."""

    name: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    addralign: int
    entsize: int


def strip(data: bytes) -> bytes | None:
    """The stripped shared object, or None for what is none or has a form that is not known."""
    if data[:6] != _ELF64:
        return None
    header = list(_HEADER.unpack_from(data))
    kind, phoff, shoff, phentsize, phnum, _, shnum, names = (header[i] for i in _FIELDS)
    if kind != _SHARED or not shoff or not shnum:
        return None
    segments = [Segment(*_SEGMENT.unpack_from(data, phoff + i * phentsize)) for i in range(phnum)]
    sections = [Section(*values) for values in _SECTION.iter_unpack(data[shoff:][: shnum * 64])]
    kept = [i for i, it in enumerate(sections) if i in (0, names) or it.flags & _ALLOCATED]
    moved, out = _compacted(data, segments)
    if len(kept) == shnum or not moved or phoff + phnum * phentsize > moved[0][1]:
        return None

    def place(offset: int) -> int | None:
        return next(
            (at + offset - start for start, end, at in moved if start <= offset < end), None
        )

    number = {old: new for new, old in enumerate(kept)}
    headers = bytearray()
    for i in kept:
        section, at = sections[i], 0
        if i == names:
            at = len(out)
            out += data[section.offset : section.offset + section.size]
        elif i and section.size and section.type != _NOBITS:
            found = place(section.offset)
            if found is None:
                return None
            at = found
        if section.link not in number:
            return None
        new = replace(section, offset=at, link=number[section.link])
        headers += _SECTION.pack(*vars(new).values())
    for i, segment in enumerate(segments):
        found = place(segment.offset) if segment.filesz else 0
        if found is None:
            return None
        new_segment = replace(segment, offset=found)
        _SEGMENT.pack_into(out, phoff + i * phentsize, *vars(new_segment).values())
    out += bytes(-len(out) % 8)
    header[_FIELDS[2]], header[_FIELDS[6]], header[_FIELDS[7]] = len(out), len(kept), number[names]
    _HEADER.pack_into(out, 0, *header)
    out += headers
    return bytes(out) if len(out) < len(data) else None


def _compacted(
    data: bytes, segments: list[Segment]
) -> tuple[list[tuple[int, int, int]], bytearray]:
    """The ranges that the loader maps, one after the other, each at its place in a page.

    Returns where each began and ended, and where it begins now; nothing if two of them overlap or
    the first does not have the file's header.
    """
    out = bytearray()
    moved = []
    end = 0
    for load in sorted((s for s in segments if s.type == _LOAD), key=lambda s: s.offset):
        if load.offset < end or (not moved and load.offset):
            return [], out
        end = load.offset + load.filesz
        out += bytes((load.offset - len(out)) % max(load.align, 1))
        moved.append((load.offset, end, len(out)))
        out += data[load.offset : end]
    return moved, out


def main(paths: list[Path]) -> None:
    """Strip every file; says what that freed."""
    for path in paths:
        before = path.read_bytes()
        after = strip(before)
        if after is None:
            continue
        mode = path.stat().st_mode
        path.unlink()  # it may be a link to another tree's
        path.write_bytes(after)
        path.chmod(mode)
        print(f"stripped {len(before) - len(after):>12,} bytes of {len(before):>12,}: {path}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
