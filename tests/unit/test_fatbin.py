"""Fat binaries made by hand: parsing, choice of entries, pruning, refusals."""

from __future__ import annotations

import struct

import pytest
from fatbins import CUBIN, LTO, PTX, Image, container, cubin
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import FatbinInvalid
from cog_triton_prune import fatbin, zero_edits

NUMBERS = (75, 80, 86, 87, 89, 90, 100, 103, 120)
IMAGES = st.builds(
    Image,
    kind=st.sampled_from([PTX, CUBIN, LTO]),
    number=st.sampled_from(NUMBERS),
    variant=st.sampled_from(["", "a", "f"]),
    packed=st.booleans(),
    name=st.sampled_from([b"", b"", b"one", b"another.cu"]),
)
CONTAINERS = st.lists(st.lists(IMAGES, max_size=5), max_size=4)
GAPS = st.integers(0, 12)


def section(containers: list[list[Image]], gaps: list[int]) -> bytes:
    return bytes(8 * gaps[0]) + b"".join(
        container(*images) + bytes(8 * gap)
        for images, gap in zip(containers, gaps[1:], strict=True)
    )


@st.composite
def sections(draw: st.DrawFn) -> tuple[bytes, list[list[Image]]]:
    containers = draw(CONTAINERS)
    gaps = [draw(GAPS) for _ in range(len(containers) + 1)]
    return section(containers, gaps), containers


def pruned(data: bytes, sm: int) -> bytes:
    buffer = bytearray(data)
    found = fatbin.parse(buffer, 0, len(buffer))
    changes = [fatbin.edit(one, fatbin.choose(one, [sm])) for one in found]
    zero_edits.apply(buffer, [change for change in changes if change])
    return bytes(buffer)


def labels(data: bytes) -> list[list[str]]:
    return [[e.label for e in one.entries] for one in fatbin.parse(data, 0, len(data))]


def kept(sm: int, *images: Image) -> tuple[str, bool]:
    data = container(*images)
    (one,) = fatbin.parse(data, 0, len(data))
    choice = fatbin.choose(one, [sm])
    return " ".join(entry.label for entry in choice.kept), choice.fits


@given(sections())
def test_parsed_entries_cover_every_byte(made: tuple[bytes, list[list[Image]]]) -> None:
    """Headers, entries and zeros put together again are the section, byte for byte."""
    data, containers = made
    found = fatbin.parse(data, 0, len(data))
    first = found[0].start if found else len(data)
    again = bytes(first) + b"".join(
        data[one.start : one.body]
        + b"".join(data[entry.start : entry.end] for entry in one.entries)
        + bytes(one.slack)
        for one in found
    )
    assert again == data
    assert [
        [(int(e.kind), e.arch.number, e.arch.variant, e.name) for e in one.entries] for one in found
    ] == [[(i.kind, i.number, i.variant, i.name) for i in images] for images in containers]


@given(sections(), st.sampled_from(NUMBERS))
def test_pruning_keeps_sizes_and_chosen_entries(
    made: tuple[bytes, list[list[Image]]], sm: int
) -> None:
    """Sizes stay, kept entries stay as they were, the rest is zero, and again changes nothing."""
    data, _ = made
    after = pruned(data, sm)
    assert len(after) == len(data)
    assert pruned(after, sm) == after
    before = fatbin.parse(data, 0, len(data))
    for one, small in zip(before, fatbin.parse(after, 0, len(after)), strict=True):
        choice = fatbin.choose(one, [sm])
        assert small.start == one.start
        assert [after[e.start : e.end] for e in small.entries] == [
            data[e.start : e.end] for e in choice.kept
        ]
        assert not any(after[small.end : one.end + one.slack])
        assert fatbin.choose(small, [sm]) == fatbin.Choice(small.entries, choice.fits)
        if one.entries:
            assert choice.kept


@given(st.lists(IMAGES, min_size=1, max_size=6), st.sampled_from(NUMBERS))
def test_nothing_that_a_gpu_would_pick_is_lost(images: list[Image], sm: int) -> None:
    """Of each module the driver takes the newest cubin that runs, else PTX that compiles."""
    data = container(*images)
    (one,) = fatbin.parse(data, 0, len(data))
    choice = fatbin.choose(one, [sm])
    for name in {entry.name for entry in one.entries}:
        module = [entry for entry in one.entries if entry.name == name]
        runs = [e for e in module if e.kind is fatbin.Kind.CUBIN and e.arch.runs_on(sm)]
        compiles = [e for e in module if e.kind is fatbin.Kind.PTX and e.arch.compiles_for(sm)]
        for pool in (runs, [] if runs else compiles):
            best = max((entry.arch.number for entry in pool), default=None)
            assert {e for e in pool if e.arch.number == best} <= set(choice.kept)
        if not runs and not compiles and not any(e.kind is fatbin.Kind.LTO for e in module):
            assert set(module) <= set(choice.kept)


SM = [Image(number=number) for number in (75, 80, 86, 90, 100, 120)]
PTX80, PTX90 = Image(PTX, 80), Image(PTX, 90)
HOPPER, FAMILY = Image(number=90, variant="a"), Image(number=100, variant="f")


@pytest.mark.parametrize(
    ("sm", "images", "labels_kept", "fits"),
    [
        (86, SM, "sm_86", True),
        (89, SM, "sm_86", True),
        (90, [*SM, HOPPER], "sm_90 sm_90a", True),
        (90, [HOPPER, PTX90], "sm_90a", True),
        (90, [SM[1], PTX80, PTX90], "compute_90", True),
        (90, [Image(PTX, 90, "a"), PTX90], "compute_90a compute_90", True),
        (120, [Image(PTX, 90, "a"), PTX80], "compute_80", True),
        (103, [Image(number=100), FAMILY, PTX80], "sm_100 sm_100f", True),
        (120, [FAMILY, PTX80], "compute_80", True),
        (87, [SM[2], PTX80], "compute_80", True),
        (89, [Image(number=87), SM[1]], "sm_80", True),
        (86, [HOPPER], "sm_90a", False),
        (75, [SM[1], PTX80], "sm_80 compute_80", False),
        (90, [Image(LTO, 80), SM[1], SM[3]], "lto_80 sm_90", True),
        (90, [Image(LTO, 80), SM[1]], "lto_80", True),
        (80, [Image(LTO, 90), Image(number=75)], "lto_90 sm_75", False),
        (86, [], "", True),
    ],
)
def test_choice_of_entries_by_gpu(
    sm: int, images: list[Image], labels_kept: str, fits: bool
) -> None:
    assert kept(sm, *images) == (labels_kept, fits)


def test_modules_of_one_container_are_chosen_from_one_by_one() -> None:
    images = [
        Image(number=80, name=b"a.cu"),
        Image(number=86, name=b"a.cu"),
        Image(number=80, name=b"b.cu"),
        Image(number=90, name=b"c.cu"),
    ]
    assert kept(86, *images) == ("sm_86 sm_80 sm_90", False)


def test_a_pruned_container_is_recognized() -> None:
    data = container(*SM) + container(SM[1]) + bytes(64)
    after = pruned(data, 86)
    assert labels(after) == [["sm_86"], ["sm_80"]]
    assert [one.was_pruned for one in fatbin.parse(data, 0, len(data))] == [False, False]
    assert [one.was_pruned for one in fatbin.parse(after, 0, len(after))] == [True, False]


def change(data: bytes, at: int, form: str, value: int) -> bytes:
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


WHOLE = container(Image(), Image(number=90)) + container(Image(number=90))
CUBIN_AT = 16 + 64


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"\1" + WHOLE, "neither a container nor zeros"),
        (WHOLE + bytes(8) + b"\1", "neither a container nor zeros"),
        (bytes(4) + WHOLE, "not aligned to 8 bytes"),
        (WHOLE[:12], "cut off"),
        (WHOLE[:-8], "ends after byte"),
        (change(WHOLE, 4, "<H", 2), "container version 2"),
        (change(WHOLE, 6, "<H", 24), "header of 24 bytes"),
        (change(WHOLE, 8, "<Q", 1 << 63), "ends after byte"),
        (change(WHOLE, 8, "<Q", 8)[:24] + bytes(8), "an entry is cut off at byte 24"),
        (change(WHOLE, 16, "<H", 4), "entry of kind 4"),
        (change(WHOLE, 18, "<H", 0x102), "version 0x102"),
        (change(WHOLE, 20, "<I", 56), "header has 56 bytes"),
        (change(WHOLE, 20, "<I", 68), "header has 68 bytes"),
        (change(WHOLE, 20, "<I", 1 << 31), "header has 2147483648 bytes"),
        (change(WHOLE, 24, "<Q", 0), "an entry of 0 bytes"),
        (change(WHOLE, 24, "<Q", 12), "an entry of 12 bytes"),
        (change(WHOLE, 24, "<Q", 1 << 62), "does not fit"),
        (change(WHOLE, 32, "<I", 1 << 30), "of them compressed"),
        (change(WHOLE, 44, "<I", 7), "an entry for SM 7 "),
        (change(WHOLE, 44, "<I", 5000), "an entry for SM 5000"),
        (change(WHOLE, 56, "<Q", 0x300011), "flags 0x300011"),
        (change(change(WHOLE, 48, "<I", 60), 52, "<I", 8), "name lies outside"),
        (change(WHOLE, CUBIN_AT, "<I", 0), "no CUDA ELF image"),
        (change(WHOLE, CUBIN_AT + 18, "<H", 62), "no CUDA ELF image"),
    ],
)
def test_unknown_layouts_are_refused(data: bytes, rule: str) -> None:
    with pytest.raises(FatbinInvalid, match=rule):
        fatbin.parse(data, 0, len(data))


@given(st.binary(max_size=300), st.integers(0, len(WHOLE) - 1))
def test_damage_is_refused_or_harmless(noise: bytes, at: int) -> None:
    """Whatever bytes there are, parsing ends in a coded error or in ranges within them."""
    data = (WHOLE[:at] + noise + WHOLE[at + len(noise) :])[: len(WHOLE)]
    try:
        found = fatbin.parse(data, 0, len(data))
    except FatbinInvalid:
        return
    for one in found:
        assert 0 <= one.start < one.body <= one.end <= one.end + one.slack <= len(data)


def test_only_the_section_is_read() -> None:
    data = b"\xff" * 24 + WHOLE + b"\xff" * 24
    found = fatbin.parse(data, 24, 24 + len(WHOLE))
    assert [entry.label for one in found for entry in one.entries] == ["sm_80", "sm_90", "sm_90"]
    assert cubin(90) in data
