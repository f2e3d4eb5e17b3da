"""nix/vllm-sizes.json: recorded of what the images hold now, and below their bounds."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = json.loads((ROOT / "nix" / "vllm-sizes.json").read_text("utf-8"))
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "vllm_image_sizes.py"))
HOPPER = 2_900_000_000
OTHERS = 1.03
"""Of sm_90's: it alone has FlashAttention 3."""


def total(sm: str) -> int:
    """Bytes of an image under zstd -9."""
    return sum(layer["zstd"] for layer in SIZES["images"][sm].values())


def test_sizes_are_those_of_what_the_images_hold() -> None:
    """If not: python scripts/vllm_image_sizes.py"""
    assert SIZES["contents"] == SCRIPT["contents"]()


def test_recorded_images_are_those_of_the_flake_with_the_same_layers() -> None:
    archs = re.findall(r'^  "(\d+)" = \{', (ROOT / "nix" / "archs.nix").read_text(), re.MULTILINE)
    assert {"90"} <= SIZES["images"].keys() <= set(archs)
    assert len({frozenset(layers) for layers in SIZES["images"].values()}) == 1


@pytest.mark.parametrize("sm", sorted(SIZES["images"]))
def test_no_image_outgrows_its_bound(sm: str) -> None:
    assert total(sm) <= (HOPPER if sm == "90" else total("90") * OTHERS)


def test_every_locked_wheel_is_weighed() -> None:
    """If not: python scripts/vllm_image_sizes.py --wheels DIRECTORY"""
    (locked,) = json.loads((ROOT / "nix" / "vllm-wheels.json").read_text("utf-8")).values()
    assert set(SIZES["wheels"]) == {wheel["file"] for wheel in locked.values()}
