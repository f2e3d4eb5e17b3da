"""Prune plans: sizes, embedded cubins, and damaged ELF files."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest
from fatbins import CUOBJDUMP, NVCC, PTX, Image, compiled, container, cubin, elf, library
from hypothesis import given
from hypothesis import strategies as st
from layers import full

from cog_triton.errors import FatbinInvalid, InvalidArgument
from cog_triton_prune import elf as elf_
from cog_triton_prune import zero_edits
from cog_triton_prune.prune_plan import Plan, make

FATBIN = container(Image(number=80), Image(number=90)) + container(Image(PTX, 80))


def pruned(data: bytes, plan: Plan) -> bytes:
    buffer = bytearray(data)
    zero_edits.apply(buffer, plan.edits)
    return bytes(buffer)


def test_plan_has_sizes_by_label() -> None:
    data = library(FATBIN)
    plan = make(data, [90])
    one, text = len(Image(number=90).pack()), len(Image(PTX).pack())
    assert plan.found == {"sm_80": one, "sm_90": one, "compute_80": text}
    assert plan.kept == {"sm_90": one, "compute_80": text}
    assert plan.freed == one
    assert (plan.containers, plan.unfit) == (2, 0)
    after = pruned(data, plan)
    assert make(after, [90]).found == plan.kept
    assert make(after, [90]).edits == ()
    fat = data.index(FATBIN)
    assert (after[:fat], after[fat + len(FATBIN) :]) == (data[:fat], data[fat + len(FATBIN) :])


def test_code_for_several_gpus_is_kept() -> None:
    data = library(container(*(Image(number=sm) for sm in (75, 80, 86, 90))), RODATA)
    plan = make(data, [80, 86], zero_embedded=True)
    assert set(plan.kept) == {"sm_80", "sm_86"}
    assert set(plan.zeroed) == {"sm_90"}
    after = pruned(data, plan)
    assert make(after, [80, 86], zero_embedded=True).edits == ()
    assert set(make(after, [86]).kept) == {"sm_86"}
    with pytest.raises(InvalidArgument, match="SM='86,90': it was pruned before"):
        make(after, [86, 90])


RODATA = (
    b"strings\0\0\0"
    + cubin(80, abi=7)
    + b"odd"
    + cubin(90)
    + cubin(86, abi=7)
    + elf([(".nv.info", 1, 2, b"host code")])
    + cubin(100, abi=9)
)


def test_cubins_in_plain_data_are_reported() -> None:
    plan = make(library(FATBIN, RODATA), [90])
    size = len(cubin(80))
    assert plan.embedded == {"sm_80": size, "sm_90": size, "sm_86": size, "sm_?": size}
    assert (plan.zeroed, plan.freed) == ({}, len(Image().pack()))


def test_cubins_of_other_gpus_become_zeros() -> None:
    data = library(FATBIN, RODATA)
    plan = make(data, [90], zero_embedded=True)
    size = len(cubin(80))
    assert plan.zeroed == {"sm_80": size, "sm_86": size}
    expected = RODATA.replace(cubin(80, abi=7), bytes(size)).replace(cubin(86, abi=7), bytes(size))
    after = pruned(data, plan)
    assert after[data.index(RODATA) :][: len(RODATA)] == expected
    assert make(after, [90], zero_embedded=True).edits == ()


def test_an_older_minor_version_stays_for_the_library_may_pick_it() -> None:
    data = library(FATBIN, cubin(80) + cubin(86) + cubin(90))
    assert list(make(data, [86], zero_embedded=True).zeroed) == ["sm_90"]


@pytest.mark.parametrize(
    "rodata",
    [
        cubin(80)[:-8],
        cubin(80)[:100],
        elf([(".text.k", 1, 6, b"k")], machine=190, abi=8, flags=0x6005004),
        cubin(80)[:58] + b"\x41\0" + cubin(80)[60:],
        cubin(80)[:32] + struct.pack("<QQ", 1 << 40, 1 << 40) + cubin(80)[48:],
    ],
    ids=["cut", "headless", "no NVIDIA section", "entry size", "tables far away"],
)
def test_data_that_is_no_provably_whole_cubin_stays(rodata: bytes) -> None:
    data = library(FATBIN, rodata)
    plan = make(data, [90], zero_embedded=True)
    assert not plan.zeroed
    assert set(plan.embedded) <= {"sm_?"}
    assert rodata in pruned(data, plan)


def test_code_and_symbols_are_not_searched_for_cubins() -> None:
    image = cubin(80)
    data = elf([(".text", 1, 6, image), (".debug", 1, 0, image), (".note", 7, 2, image)])
    assert not make(data, [90], zero_embedded=True).has_device_code


def test_a_library_without_device_code_has_an_empty_plan() -> None:
    assert not make(elf([(".text", 1, 6, b"\xc3")]), [90]).has_device_code
    assert not make(elf([(".nv_fatbin", elf_.NOBITS, 2, b"")]), [90]).has_device_code


SECTION_OFFSET, COUNT, NAMES = 40, 60, 62


def change(data: bytes, at: int, form: str, value: int) -> bytes:
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def table_of(data: bytes) -> int:
    return int.from_bytes(data[SECTION_OFFSET : SECTION_OFFSET + 8], "little")


WHOLE = library(FATBIN)


TWICE = elf([(".nv_fatbin", 1, 2, FATBIN), (".nv_fatbin", 1, 2, FATBIN)])
OVERLAPPING = change(TWICE, table_of(TWICE) + 2 * 64 + 24, "<Q", 64)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (change(WHOLE, SECTION_OFFSET, "<Q", 1 << 60), "section table lies outside"),
        (change(WHOLE, COUNT, "<H", 500), "500 sections does not fit"),
        (change(WHOLE, NAMES, "<H", 77), "does not fit"),
        (change(WHOLE, table_of(WHOLE) + 2 * 64 + 32, "<Q", 1 << 50), "the file at"),
        (change(WHOLE, SECTION_OFFSET, "<Q", 0), "no section table"),
        (change(WHOLE, 58, "<H", 40), "no ELF header"),
        (elf([(".nv_fatbin", 1, 0x802, FATBIN)]), "section .nv_fatbin is compressed"),
        (library(FATBIN + b"garbage!"), "neither a container nor zeros"),
        (OVERLAPPING, "two sections have it"),
    ],
)
def test_damaged_files_are_refused(data: bytes, rule: str) -> None:
    with pytest.raises(FatbinInvalid, match=rule):
        make(data, [90])


def test_counts_that_need_more_than_16_bits_are_in_the_first_section() -> None:
    table = table_of(WHOLE)
    count = int.from_bytes(WHOLE[COUNT : COUNT + 2], "little")
    data = change(change(WHOLE, COUNT, "<H", 0), NAMES, "<H", 0xFFFF)
    data = change(change(data, table + 32, "<Q", count), table + 40, "<I", count - 1)
    assert make(data, [90]).found == make(WHOLE, [90]).found


@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=16), st.booleans())
def test_random_damage_is_refused_or_edits_stay_within_the_file(
    at: int, noise: bytes, cut: bool
) -> None:
    data = WHOLE[:at] + noise + (b"" if cut else WHOLE[at + len(noise) :])
    try:
        plan = make(data, [90], zero_embedded=True)
    except FatbinInvalid:
        return
    assert len(pruned(data, plan)) == len(data)


needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc of CUDA 12.9")
CODES = (
    "sm_80 sm_86 sm_90 sm_90a sm_100f sm_103a sm_120 compute_80 compute_90a compute_100f"
    " compute_120"
)
MODES = {
    "none": ["--no-compress"],
    "default": [],
    "all": ["-Xfatbin", "-compress-all"],
}


@pytest.fixture(scope="module", params=[full("none"), "default", full("all")])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return compiled(directory, CODES, *MODES[request.param])


def pruned_file(path: Path, sm: int, to: Path) -> tuple[Plan, Path]:
    data = bytearray(path.read_bytes())
    plan = make(data, [sm])
    zero_edits.apply(data, plan.edits)
    to.mkdir()
    made = to / path.name
    made.write_bytes(data)
    return plan, made


@needs_nvcc
def test_all_architectures_of_nvcc_are_found(built: Path) -> None:
    plan = make(built.read_bytes(), [90])
    assert set(plan.found) == set(CODES.split())
    assert plan.containers == 2


@pytest.mark.parametrize(
    ("sm", "kept"),
    [
        (80, {"sm_80"}),
        (86, {"sm_86"}),
        (89, {"sm_86"}),
        (90, {"sm_90", "sm_90a"}),
        (100, {"sm_100f"}),
        (103, {"sm_103a"}),
        (110, {"compute_80"}),
        (121, {"sm_120"}),
        (130, {"compute_120"}),
    ],
)
@needs_nvcc
def test_kept_architectures_for_each_gpu(
    built: Path, sm: int, kept: set[str], tmp_path: Path
) -> None:
    plan, made = pruned_file(built, sm, tmp_path / "out")
    assert set(plan.kept) == kept
    after = make(made.read_bytes(), [sm])
    assert (after.found, after.edits) == (plan.kept, ())


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
@needs_nvcc
def test_cuobjdump_reads_pruned_files(built: Path, tmp_path: Path) -> None:
    plan, made = pruned_file(built, 90, tmp_path / "out")
    assert dumped(built) == {label.removesuffix("f") for label in plan.found}
    assert dumped(made) == {"sm_90", "sm_90a"}
    before, after = (
        extracted(path, tmp_path / name) for name, path in (("before", built), ("after", made))
    )
    assert after == [cubin for cubin in before if cubin[0] in ("sm_90", "sm_90a")]
    assert len(after) == 4


def dumped(path: Path) -> set[str]:
    """Architectures that cuobjdump lists: cubins, with sm_100f told as sm_100, and PTX."""
    assert CUOBJDUMP
    text = subprocess.run(
        [CUOBJDUMP, "--list-elf", "--list-ptx", path], check=True, capture_output=True, text=True
    ).stdout
    cubins = re.findall(r"\.(sm_\w+)\.cubin", text)
    return {
        *cubins,
        *(f"compute_{a}".removesuffix("f") for a in re.findall(r"sm_(\w+)\.ptx", text)),
    }


def extracted(path: Path, to: Path) -> list[tuple[str, bytes]]:
    """Architecture and bytes of every cubin, as cuobjdump takes and decompresses them."""
    assert CUOBJDUMP
    to.mkdir()
    subprocess.run(
        [CUOBJDUMP, "--extract-elf", "all", path], check=True, cwd=to, capture_output=True
    )
    return sorted((made.name.split(".")[-2], made.read_bytes()) for made in to.glob("*.cubin"))
