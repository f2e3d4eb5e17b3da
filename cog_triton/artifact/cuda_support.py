"""CUDA against NVIDIA's driver: minor version compatibility, and the forward compatibility package.

Sources:
    docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html: within a major
    version of CUDA all minor ones run on that version's first drivers, here by their full numbers
    as others quote the CUDA Toolkit Release Notes.
    docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html: the package cuda-compat is
    for data centre GPUs, and some RTX cards in servers.
    docs.nvidia.com/deeplearning/triton-inference-server/release-notes/rel-25-08.html, "Driver
    Requirements": branches of the driver that go with it, and those that do not, under CUDA 13.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Sequence

from cog_triton.errors import EngineIncompatible
from cog_triton.system.gpus import NVIDIADriver, hidden, installed_driver

FLOORS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest driver by major version of CUDA."""
FORWARD = {"470": "470.57", "525": "525.85", "535": "535.86"}
"""Branches of the driver that cuda-compat runs on, each from a version on."""
NOT_FORWARD = ("418", "440", "450", "460", "510", "520", "530", "545", "555")
"""Branches that it does not run on; of all others the source says nothing."""
_RUNTIME = re.compile(r"nvidia[-_]cuda[-_]runtime(?:[-_]cu\d+)?")
_NO_DATA_CENTRE = re.compile(r"GeForce|TITAN", re.IGNORECASE)
_PERHAPS = re.compile(r"RTX|Quadro", re.IGNORECASE)


def cuda_of_image() -> str | None:
    """CUDA's version of the image that this runs in: CUDA_VERSION, which NVIDIA's and ours set."""
    return os.environ.get("CUDA_VERSION") or None


def cuda_of_packages(paths: Sequence[str]) -> str | None:
    """CUDA's version in directories of packages: that of NVIDIA's wheel of its runtime library."""
    for package in importlib.metadata.distributions(path=list(paths)):
        if _RUNTIME.fullmatch(package.metadata["Name"] or ""):
            return package.version
    return None


def require_packages(paths: Sequence[str], what: str) -> None:
    """Raise E1305 if the driver here is too old for the CUDA in these directories of packages."""
    if (cuda := cuda_of_packages(paths)) and not hidden():
        require_driver(cuda, installed_driver(), what)


def require_driver(
    cuda: str | None,
    here: NVIDIADriver,
    what: str,
    gpus: Sequence[str] = (),
    *,
    compat: bool = False,
) -> str | None:
    """Check the driver `here` against `cuda` in `what`; a remark on what is not certain.

    Args:
        gpus: names of this machine's.
        compat: whether `what` carries the forward compatibility package.

    Raises:
        EngineIncompatible: with both versions, the one that is needed, and what to do.
    """
    wanted = _numbers(cuda)
    floor = FLOORS.get(wanted[0]) if wanted else None
    if cuda is None or not wanted or (floor is None and here.cuda is None):
        return f"{what}: its CUDA is {cuda or 'not known'}, so the {here} was not compared"
    oldest = floor or f"of CUDA {wanted[0]}"
    problem = f"{what} has CUDA {cuda}, which needs driver {oldest} or newer"
    if here.cuda is None and here.version is None:
        return f"{problem}; the one here is not known"
    by_cuda = here.cuda is not None and here.cuda[0] >= wanted[0]
    by_version = floor is not None and _numbers(here.version) >= _numbers(floor)
    if by_cuda or by_version:
        if here.cuda is not None and here.cuda < wanted[:2]:
            return (
                f"{what} has CUDA {cuda}, here is {here}: it runs (minor version compatibility),"
                " but for kernels that are compiled at run time: update the driver if they fail"
            )
        return None
    problem += f"; here is {here}"
    if not compat:
        raise EngineIncompatible(
            f"{problem}: update NVIDIA's driver, or use an image of CUDA"
            f" {here.cuda[0] if here.cuda else wanted[0] - 1} or older"
        )
    return _forward(problem, here, gpus)


def _forward(problem: str, here: NVIDIADriver, gpus: Sequence[str]) -> str:
    """Remark on what cuda-compat makes of a `problem`, which it raises where that does not help."""
    branch = (here.version or "").partition(".")[0]
    if others := [name for name in gpus if _NO_DATA_CENTRE.search(name)]:
        why = f"its forward compatibility is not for {others[0]}, but for data centre GPUs"
    elif branch in NOT_FORWARD or (
        branch in FORWARD and _numbers(here.version) < _numbers(FORWARD[branch])
    ):
        why = (
            f"its forward compatibility is not for that, but for {', '.join(FORWARD.values())}"
            " and later ones of these branches"
        )
    else:
        known = branch in FORWARD and not any(_PERHAPS.search(name) for name in gpus)
        sure = "goes" if known else "may go, NVIDIA's table has no word on it,"
        return (
            f"{problem}; it {sure} by the image's forward compatibility (cuda-compat), which"
            " NVIDIA's container toolkit 1.17 and later enables"
        )
    raise EngineIncompatible(f"{problem}, and {why}: update NVIDIA's driver")


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,9}", version or ""))
