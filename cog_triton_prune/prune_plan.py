"""Prune plan of one file: what would be kept and zeroed, from its bytes alone.

Embedded cubins are CUDA ELF images in plain data, as TensorRT-LLM has them in C arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from cog_triton.errors import FatbinInvalid, InvalidArgument
from cog_triton_prune import elf, fatbin
from cog_triton_prune.gpu_arch import Arch
from cog_triton_prune.zero_edits import Bytes, Edit


class Plan(NamedTuple):
    """Device code of a file and what would be zeroed; bytes by label (sm_90a, compute_80).

    `found` and `kept` are of fat binaries, `embedded` and `zeroed` of cubins in plain data.
    `containers` counts fat binaries and `unfit` those that have nothing for a GPU and stay whole.
    """

    found: dict[str, int]
    kept: dict[str, int]
    embedded: dict[str, int]
    zeroed: dict[str, int]
    containers: int = 0
    unfit: int = 0
    edits: tuple[Edit, ...] = ()

    @property
    def freed(self) -> int:
        """Bytes that become zeros."""
        return sum(edit.freed for edit in self.edits)

    @property
    def has_device_code(self) -> bool:
        """Whether the file has any device code."""
        return bool(self.found or self.embedded)


EMPTY = Plan({}, {}, {}, {})


class _Image(NamedTuple):
    """An embedded cubin; `sm` is None where it is not proven whole, `end` then a guess."""

    start: int
    end: int
    sm: int | None

    @property
    def label(self) -> str:
        return f"sm_{'?' if self.sm is None else self.sm}"


def make(buffer: Bytes, sms: Sequence[int], zero_embedded: bool = False) -> Plan:
    """Plan for the shared object in `buffer` and GPUs of the compute capabilities `sms`.

    Raises:
        FatbinInvalid: the file, or device code in it, is not laid out as known.
        InvalidArgument: it was pruned before, for GPUs that `sms` cannot do with.
    """
    sections = elf.sections(buffer)
    if not sections and fatbin.MAGIC in buffer:
        raise FatbinInvalid("no section table, so nothing says where its device code ends")
    containers: list[fatbin.Container] = []
    images: list[_Image] = []
    for section in sections:
        if section.name in fatbin.SECTIONS and section.type != elf.NOBITS:
            if section.flags & elf.COMPRESSED:
                raise FatbinInvalid(f"section {section.name} is compressed")
            containers += fatbin.parse(buffer, section.offset, section.end)
        elif section.name not in fatbin.SECTIONS and section.is_plain_data:
            images += _images(buffer, section)
    choices = [fatbin.choose(container, sms) for container in containers]
    edits: list[Edit | None] = []
    for container, choice in zip(containers, choices, strict=True):
        if container.was_pruned and not choice.fits:
            raise InvalidArgument(
                f"SM='{','.join(map(str, sms))}': it was pruned before and has only"
                f" {', '.join(entry.label for entry in container.entries)} left at byte"
                f" {container.start}; prune the original"
            )
        edits.append(fatbin.edit(container, choice))
    zeroed = [
        image
        for image in images
        if zero_embedded and image.sm is not None and not any(map(Arch(image.sm).runs_on, sms))
    ]
    edits += [Edit(image.start, image.end) for image in zeroed]
    ordered = sorted(filter(None, edits), key=lambda edit: edit.start)
    for one, other in pairwise(ordered):  # sections of a damaged file may overlap
        if other.start < one.end:
            raise FatbinInvalid(f"byte {other.start}: two sections have it")
    return Plan(
        found=_by_label(entry for container in containers for entry in container.entries),
        kept=_by_label(entry for choice in choices for entry in choice.kept),
        embedded=_by_label(images),
        zeroed=_by_label(zeroed),
        containers=len(containers),
        unfit=sum(not choice.fits for choice in choices),
        edits=tuple(ordered),
    )


def _images(buffer: Bytes, section: elf.Section) -> Iterator[_Image]:
    at = section.offset
    while (at := buffer.find(elf.START, at, section.end)) >= 0:
        head = elf.header(buffer, at)
        if head is None or head.machine != elf.MACHINE_CUDA:
            at += len(elf.START)
            continue
        image = _image(buffer, at, section.end, head)
        yield image
        at = image.end


def _image(buffer: Bytes, start: int, limit: int, head: elf.Header) -> _Image:
    unproven = _Image(start, start + elf.HEADER_SIZE, None)
    try:
        inner = elf.sections(buffer, start, limit)
    except FatbinInvalid:
        return unproven
    table_end = start + head.section_offset + len(inner) * elf.SECTION_SIZE
    end = max([table_end, start + head.program_end, *(section.end for section in inner)])
    if end > limit or not any(section.name.startswith(".nv.") for section in inner):
        return unproven
    # The SM number in e_flags: seen in what ptxas 12.9 (ABI 7) and 13.0 (ABI 8) write.
    sm = {7: head.flags & 0xFF, 8: head.flags >> 8 & 0xFF}.get(head.abi_version)
    return _Image(start, end, sm)


def _by_label(parts: Iterable[fatbin.Entry | _Image]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for part in parts:
        sizes[part.label] += part.end - part.start
    return dict(sizes)
