"""Libraries that nvcc builds, against NVIDIA's own cuobjdump where it is installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from fatbins import CUOBJDUMP, NVCC, compiled

from cog_triton_prune import zero_edits
from cog_triton_prune.prune_plan import Plan, make

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc of CUDA 12.9")
CODES = (
    "sm_80 sm_86 sm_90 sm_90a sm_100f sm_103a sm_120 compute_80 compute_90a compute_100f"
    " compute_120"
)
MODES = {
    "none": ["--no-compress"],
    "default": [],
    "all": ["-Xfatbin", "-compress-all"],
}


@pytest.fixture(scope="module", params=MODES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return compiled(directory, CODES, *MODES[request.param])


def pruned(path: Path, sm: int, to: Path) -> tuple[Plan, Path]:
    data = bytearray(path.read_bytes())
    plan = make(data, [sm])
    zero_edits.apply(data, plan.edits)
    to.mkdir()
    made = to / path.name
    made.write_bytes(data)
    return plan, made


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
def test_kept_architectures_for_each_gpu(
    built: Path, sm: int, kept: set[str], tmp_path: Path
) -> None:
    plan, made = pruned(built, sm, tmp_path / "out")
    assert set(plan.kept) == kept
    after = make(made.read_bytes(), [sm])
    assert (after.found, after.edits) == (plan.kept, ())


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump")
def test_cuobjdump_reads_pruned_files(built: Path, tmp_path: Path) -> None:
    plan, made = pruned(built, 90, tmp_path / "out")
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
