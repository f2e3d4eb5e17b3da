"""Embedded cubins: CUDA ELF images in plain data, as TensorRT-LLM has them in C arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cog_triton.errors import FatbinInvalid
from cog_triton_prune.elf import (
    ALLOC,
    COMPRESSED,
    EXECINSTR,
    MACHINE_CUDA,
    PROGBITS,
    Header,
    Section,
    header,
    sections,
)
from cog_triton_prune.fatbin import SECTIONS
from cog_triton_prune.gpu_arch import Arch
from cog_triton_prune.zero_edits import Bytes, Edit

_START = b"\x7fELF\x02\x01"


@dataclass(frozen=True)
class Image:
    """A CUDA ELF image in data; `sm` is None where it is not proven whole, `end` then a guess."""

    start: int
    end: int
    sm: int | None

    @property
    def label(self) -> str:
        """sm_90, or sm_? where nothing is proven."""
        return f"sm_{'?' if self.sm is None else self.sm}"


def find(buffer: Bytes, host_sections: list[Section]) -> list[Image]:
    """The CUDA ELF images in the data sections of a host file, fat binaries left out."""
    images = []
    for section in host_sections:
        plain_data = section.type == PROGBITS and section.flags & ALLOC
        if not plain_data or section.flags & (EXECINSTR | COMPRESSED) or section.name in SECTIONS:
            continue
        at = section.offset
        while (at := buffer.find(_START, at, section.end)) >= 0:
            head = header(buffer, at)
            if head is None or head.machine != MACHINE_CUDA:
                at += len(_START)
                continue
            image = _image(buffer, at, section.end, head)
            images.append(image)
            at = image.end
    return images


def edit(image: Image, sms: Sequence[int]) -> Edit | None:
    """How to zero an image that provably is for other GPUs than `sms`; None if it stays."""
    if image.sm is None or any(map(Arch(image.sm).runs_on, sms)):
        return None
    return Edit(image.start, image.end)


def _image(buffer: Bytes, start: int, limit: int, head: Header) -> Image:
    unproven = Image(start, start + 64, None)
    try:
        inner = sections(buffer, start, limit)
    except FatbinInvalid:
        return unproven
    table_end = start + head.section_offset + len(inner) * 64
    end = max([table_end, start + head.program_end, *(section.end for section in inner)])
    if end > limit or not any(section.name.startswith(".nv.") for section in inner):
        return unproven
    return Image(start, end, _sm(head))


def _sm(head: Header) -> int | None:
    """The SM number in e_flags: seen in what ptxas 12.9 (ABI 7) and 13.0 (ABI 8) write."""
    if head.abi_version == 7:
        return head.flags & 0xFF
    if head.abi_version == 8:
        return head.flags >> 8 & 0xFF
    return None
