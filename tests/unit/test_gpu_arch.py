"""GPU architectures: which code runs where, and how a GPU is named."""

from __future__ import annotations

import pytest

from cog_triton.errors import InvalidArgument
from cog_triton_prune.gpu_arch import Arch, parse_sms


@pytest.mark.parametrize(
    ("arch", "runs", "not_on"),
    [
        (Arch(80), (80, 86, 89), (75, 87, 90, 120)),
        (Arch(90), (90,), (89, 100)),
        (Arch(90, "a"), (90,), (89, 100)),
        (Arch(100), (100, 103), (90, 101, 110, 120)),
        (Arch(100, "a"), (100,), (103,)),
        (Arch(100, "f"), (100, 103), (90, 101, 110, 120)),
        (Arch(103, "a"), (103,), (100,)),
        (Arch(120, "f"), (120, 121), (100, 103)),
    ],
)
def test_cubins_run_on_their_major_version(
    arch: Arch, runs: tuple[int, ...], not_on: tuple[int, ...]
) -> None:
    assert [sm for sm in (*runs, *not_on) if arch.runs_on(sm)] == list(runs)


@pytest.mark.parametrize(
    ("arch", "compiles", "not_for"),
    [
        (Arch(80), (80, 86, 87, 90, 121), (75,)),
        (Arch(90, "a"), (90,), (89, 100, 120)),
        (Arch(100, "f"), (100, 103), (90, 110, 120)),
    ],
)
def test_ptx_compiles_for_later_gpus(
    arch: Arch, compiles: tuple[int, ...], not_for: tuple[int, ...]
) -> None:
    assert [sm for sm in (*compiles, *not_for) if arch.compiles_for(sm)] == list(compiles)


@pytest.mark.parametrize(
    ("text", "sms"),
    [
        ("86", (86,)),
        (" 90 ", (90,)),
        ("12.1", (121,)),
        ("8.6, sm_80,86", (80, 86)),
    ],
)
def test_sm_names_are_parsed(text: str, sms: tuple[int, ...]) -> None:
    assert parse_sms(text) == sms


NAMES = ["", "A10", "8.66", "-86", "sm_90a"]


@pytest.mark.parametrize("name", NAMES)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="must be a GPU's compute capability") as caught:
        parse_sms(f"80,{name}")
    assert f"SM={name!r}" in str(caught.value)
    hint = "for this GPU say 90: code for sm_90a is kept"
    assert (hint in str(caught.value)) is name.endswith("90a")
