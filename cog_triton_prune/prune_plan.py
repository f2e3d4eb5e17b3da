"""Prune plan of one file: what would be kept and zeroed, from its bytes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cog_triton.errors import FatbinInvalid, InvalidArgument
from cog_triton_prune import elf, embedded_cubins, fatbin
from cog_triton_prune.zero_edits import Bytes, Edit


@dataclass(frozen=True)
class Plan:
    """Device code of a file and what would be zeroed; bytes by label (sm_90a, compute_80).

    `found` and `kept` are of fat binaries, `embedded` and `zeroed` of cubins in plain data.
    `containers` counts fat binaries and `unfit` those that have nothing for a GPU and stay whole.
    """

    found: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    embedded: dict[str, int] = field(default_factory=dict)
    zeroed: dict[str, int] = field(default_factory=dict)
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


def make(buffer: Bytes, sms: Sequence[int], zero_embedded: bool = False) -> Plan:
    """Plan for the shared object in `buffer` and GPUs of the compute capabilities `sms`.

    Raises:
        FatbinInvalid: the file, or device code in it, is not laid out as known.
        InvalidArgument: it was pruned before, for GPUs that `sms` cannot do with.
    """
    sections = elf.sections(buffer)
    if not sections and fatbin.MAGIC in buffer:
        raise FatbinInvalid("no section table, so nothing says where its device code ends")
    containers = [
        container
        for section in sections
        if section.name in fatbin.SECTIONS and section.type != elf.NOBITS
        for container in _containers(buffer, section)
    ]
    choices = [fatbin.choose_for(container, sms) for container in containers]
    for container, choice in zip(containers, choices, strict=True):
        if container.was_pruned and not choice.fits:
            raise InvalidArgument(
                f"SM='{','.join(map(str, sms))}': it was pruned before and has only"
                f" {', '.join(entry.label for entry in container.entries)} left at byte"
                f" {container.start}; prune the original"
            )
    changes = [fatbin.edit(*pair) for pair in zip(containers, choices, strict=True)]
    images = embedded_cubins.find(buffer, sections)
    zeroed = {
        image: edit
        for image in images
        if zero_embedded and (edit := embedded_cubins.edit(image, sms))
    }
    return Plan(
        found=_by_label(entry for container in containers for entry in container.entries),
        kept=_by_label(entry for choice in choices for entry in choice.kept),
        embedded=_by_label(images),
        zeroed=_by_label(zeroed),
        containers=len(containers),
        unfit=sum(not choice.fits for choice in choices),
        edits=_disjoint([*(edit for edit in changes if edit), *zeroed.values()]),
    )


def _disjoint(edits: list[Edit]) -> tuple[Edit, ...]:
    """Sort `edits`; refuses overlaps, which sections of a damaged file may have."""
    ordered = sorted(edits, key=lambda edit: edit.start)
    for one, other in pairwise(ordered):
        if other.start < one.end:
            raise FatbinInvalid(f"byte {other.start}: two sections have it")
    return tuple(ordered)


def _containers(buffer: Bytes, section: elf.Section) -> list[fatbin.Container]:
    if section.flags & elf.COMPRESSED:
        raise FatbinInvalid(f"section {section.name} is compressed")
    return fatbin.parse(buffer, section.offset, section.end)


def _by_label(parts: Iterable[fatbin.Entry | embedded_cubins.Image]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for part in parts:
        sizes[part.label] += part.end - part.start
    return dict(sizes)
