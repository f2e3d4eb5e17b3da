"""CUDA fat binaries: parsing, and choice of the device code that one GPU needs.

The ELF sections `.nv_fatbin` and `__nv_relfatbin` are runs of containers, 8-byte aligned, zeros
between them; integers are little-endian:

  container   u32 magic 0xBA55ED50, u16 version 1, u16 header size 16, u64 size of its entries
  entry       u16 kind, u16 version 0x101, u32 header size, u64 payload size, u32 compressed size
              (0: stored plainly), u32 offset of options, u16 minor, u16 major, u32 SM number,
              u32 offset and u32 size of a name, u64 flags, u64 -, u64 uncompressed size, options

The layout is not published; it was read off what nvcc 13.0 writes and checked against cuobjdump.
Nothing here does I/O: it reads a buffer and says which bytes may become zeros.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from cog_triton.errors import FatbinInvalid
from cog_triton_prune.elf import MACHINE_CUDA, header
from cog_triton_prune.gpu_arch import Arch
from cog_triton_prune.zero_edits import Bytes, Edit, is_zero

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<4sHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_ALIGNMENT = 8
_ARCH_SPECIFIC, _FAMILY_SPECIFIC = 0x100000, 0x200000
_VARIANTS = {0: "", _ARCH_SPECIFIC: "a", _FAMILY_SPECIFIC: "f"}


class Kind(IntEnum):
    """What an entry holds: text for the driver to compile, machine code, or code to link."""

    PTX = 1
    CUBIN = 2
    LTO = 8


_PREFIX = {Kind.PTX: "compute_", Kind.CUBIN: "sm_", Kind.LTO: "lto_"}


@dataclass(frozen=True)
class Entry:
    """Entry of a container: one image, bytes `start` to `end` with header; `name` is its module."""

    start: int
    end: int
    kind: Kind
    arch: Arch
    name: bytes

    @property
    def label(self) -> str:
        """Kind and architecture as nvcc spells them: sm_90a, compute_80, lto_90."""
        return f"{_PREFIX[self.kind]}{self.arch}"


@dataclass(frozen=True)
class Container:
    """Container of entries: header from `start`, entries from `body` to `end`, `slack` zeros."""

    start: int
    body: int
    end: int
    slack: int
    entries: tuple[Entry, ...]

    @property
    def was_pruned(self) -> bool:
        """Whether the zeros behind it once held an entry; linkers leave fewer."""
        return self.slack > _ENTRY.size


@dataclass(frozen=True)
class Choice:
    """The entries of a container to keep; `fits` is False if none of them runs on the GPU."""

    kept: tuple[Entry, ...]
    fits: bool


def parse(buffer: Bytes, start: int, end: int) -> list[Container]:
    """All containers of the section at bytes `start` to `end`.

    Raises:
        FatbinInvalid: something there is not as described above; names the byte.
    """
    starts: list[tuple[int, int, int]] = []
    at = start
    while True:
        found = buffer.find(MAGIC, at, end)
        stop = end if found < 0 else found
        if not is_zero(buffer, at, stop):
            raise FatbinInvalid(f"byte {at}: neither a container nor zeros up to byte {stop}")
        if found < 0:
            break
        body, at = _container(buffer, found, end)
        starts.append((found, body, at))
    following = [begin for begin, _, _ in starts[1:]] + [end]
    return [
        Container(begin, body, stop, after - stop, _entries(buffer, body, stop))
        for (begin, body, stop), after in zip(starts, following, strict=False)
    ]


def choose(container: Container, sms: Sequence[int]) -> Choice:
    """Choose the entries of a container that GPUs of any of the compute capabilities `sms` need.

    For each, the cubins with the highest SM number that run on it (sm_90 and sm_90a alike);
    without any, the PTX with the highest that compiles for it; link-time code always. Of a
    container that has nothing for the GPU everything stays: what is there was not meant for it, or
    cannot be judged.
    """
    kept: set[Entry] = set()
    fits = True
    for sm, name in itertools.product(sms, {entry.name for entry in container.entries}):
        module = [entry for entry in container.entries if entry.name == name]
        linked = [entry for entry in module if entry.kind is Kind.LTO]
        usable = [e for e in module if e.kind is Kind.CUBIN and e.arch.runs_on(sm)] or [
            e for e in module if e.kind is Kind.PTX and e.arch.compiles_for(sm)
        ]
        if usable or any(entry.arch.compiles_for(sm) for entry in linked):
            best = max((entry.arch.number for entry in usable), default=0)
            kept |= {entry for entry in usable if entry.arch.number == best} | set(linked)
        else:
            fits = False
            kept |= set(module)
    return Choice(tuple(entry for entry in container.entries if entry in kept), fits)


def edit(container: Container, choice: Choice) -> Edit | None:
    """Edit that leaves only `choice` in its container; None if nothing changes."""
    if choice.kept == container.entries:
        return None
    kept = tuple((entry.start, entry.end) for entry in choice.kept)
    return Edit(container.body, container.end, kept, length_at=container.body - 8)


def _container(buffer: Bytes, at: int, end: int) -> tuple[int, int]:
    if at % _ALIGNMENT or end - at < _CONTAINER.size:
        raise FatbinInvalid(f"byte {at}: a container is not aligned to 8 bytes, or cut off")
    _, version, header_size, size = _CONTAINER.unpack_from(buffer, at)
    if version != 1 or header_size != _CONTAINER.size:
        raise FatbinInvalid(
            f"byte {at}: container version {version} with a header of {header_size} bytes;"
            " known are 1 and 16"
        )
    body = at + header_size
    if size > end - body:
        raise FatbinInvalid(f"byte {at}: a container of {size} bytes ends after byte {end}")
    return body, body + size


def _entries(buffer: Bytes, body: int, end: int) -> tuple[Entry, ...]:
    entries = []
    at = body
    while at < end:
        entry = _entry(buffer, at, end)
        entries.append(entry)
        at = entry.end
    return tuple(entries)


def _entry(buffer: Bytes, at: int, end: int) -> Entry:
    if end - at < _ENTRY.size:
        raise FatbinInvalid(f"byte {at}: an entry is cut off at byte {end}")
    (kind, version, header_size, size, compressed, _, _, _, number, name_at, name_size, flags, _, _
     ) = _ENTRY.unpack_from(buffer, at)  # fmt: skip
    payload = at + header_size
    if kind not in iter(Kind) or version != 0x101:
        raise FatbinInvalid(
            f"byte {at}: entry of kind {kind}, version {version:#x}; known are the kinds"
            f" {', '.join(str(int(known)) for known in Kind)} of version 0x101"
        )
    if header_size < _ENTRY.size or header_size % _ALIGNMENT or payload > end:
        raise FatbinInvalid(f"byte {at}: an entry's header has {header_size} bytes")
    if not size or size % _ALIGNMENT or size > end - payload or compressed > size:
        raise FatbinInvalid(
            f"byte {at}: an entry of {size} bytes, {compressed} of them compressed, does not fit"
            f" the {end - payload} left of its container"
        )
    variant = _VARIANTS.get(flags & (_ARCH_SPECIFIC | _FAMILY_SPECIFIC))
    if variant is None or not 10 <= number < 1000:
        raise FatbinInvalid(f"byte {at}: an entry for SM {number} with flags {flags:#x}")
    if name_size and name_at + name_size > header_size:
        raise FatbinInvalid(f"byte {at}: an entry's name lies outside its header")
    if kind == Kind.CUBIN and not compressed:
        image = header(buffer, payload)
        if image is None or image.machine != MACHINE_CUDA:
            raise FatbinInvalid(f"byte {payload}: a cubin that is no CUDA ELF image")
    name = bytes(buffer[at + name_at : at + name_at + name_size]) if name_size else b""
    return Entry(at, payload + size, Kind(kind), Arch(number, variant), name)
