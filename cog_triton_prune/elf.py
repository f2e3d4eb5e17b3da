"""The section table of a 64-bit little-endian ELF file.

Source: System V ABI, "Object Files"; field names are its own.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from cog_triton.errors import FatbinInvalid
from cog_triton_prune.zero_edits import Bytes

START = b"\x7fELF\x02\x01"
MACHINE_CUDA = 190
PROGBITS, NOBITS = 1, 8
ALLOC, EXECINSTR, COMPRESSED = 0x2, 0x4, 0x800
_EXECUTABLE, _SHARED = 2, 3
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
HEADER_SIZE, SECTION_SIZE = _HEADER.size, _SECTION.size
_MANY = 0xFFFF


class Section(NamedTuple):
    """One section; `offset` is counted from the start of the file."""

    name: str
    type: int
    flags: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the byte after it; a section without bytes in the file is empty."""
        return self.offset + (0 if self.type == NOBITS else self.size)

    @property
    def is_plain_data(self) -> bool:
        """Whether it is loaded as data, as it is in the file."""
        return self.type == PROGBITS and self.flags & (ALLOC | EXECINSTR | COMPRESSED) == ALLOC


class Header(NamedTuple):
    """Fields of the ELF header that pruning needs."""

    abi_version: int
    type: int
    machine: int
    flags: int
    program_end: int
    section_offset: int
    section_count: int
    names_index: int


def header(buffer: Bytes, start: int = 0) -> Header | None:
    """The ELF header at `start`; None if there is no 64-bit little-endian one."""
    if buffer[start : start + len(START)] != START or len(buffer) - start < HEADER_SIZE:
        return None
    (ident, kind, machine, _, _, phoff, shoff, flags, _, phentsize, phnum, shentsize, shnum, names
     ) = _HEADER.unpack_from(buffer, start)  # fmt: skip
    if shoff and shentsize != SECTION_SIZE:
        return None
    program_end = phoff + phentsize * phnum
    return Header(ident[8], kind, machine, flags, program_end, shoff, shnum, names)


def is_loadable(path: Path) -> bool:
    """Whether the file is a shared object or a program: those hold device code to run."""
    with path.open("rb") as file:
        found = header(file.read(HEADER_SIZE))
    return found is not None and found.type in (_EXECUTABLE, _SHARED)


def sections(buffer: Bytes, start: int = 0, end: int | None = None) -> list[Section]:
    """All sections of the ELF file at `start`, which ends at `end` at the latest.

    Raises:
        FatbinInvalid: the table, or a section, does not lie within the file.
    """
    limit = len(buffer) if end is None else end
    found = header(buffer, start)
    if found is None:
        raise FatbinInvalid(f"byte {start}: no ELF header")
    if not found.section_offset:
        return []
    table = start + found.section_offset
    if table + SECTION_SIZE > limit:
        raise FatbinInvalid(f"byte {table}: the section table lies outside the file")
    first = _SECTION.unpack_from(buffer, table)
    # Counts that do not fit the header's 16 bits are kept in the first section.
    count = found.section_count or first[5]
    names_index = first[6] if found.names_index == _MANY else found.names_index
    if table + count * SECTION_SIZE > limit or names_index >= count:
        raise FatbinInvalid(f"byte {table}: a table of {count} sections does not fit the file")
    rows = [_SECTION.unpack_from(buffer, table + i * SECTION_SIZE) for i in range(count)]
    names_start = start + rows[names_index][4]
    names_end = names_start + rows[names_index][5]
    made = []
    for name, kind, flags, _, offset, size, *_ in rows:
        at = names_start + name
        shown = bytes(buffer[at : max(at, buffer.find(b"\0", at, names_end))])
        section = Section(shown.decode("utf-8", "replace"), kind, flags, start + offset, size)
        if section.end > limit:
            raise FatbinInvalid(
                f"section {section.name!r} ends at {section.end}, the file at {limit}"
            )
        made.append(section)
    return made
