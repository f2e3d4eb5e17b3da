"""Pre-flight check: image and engine against this machine, before anything is loaded.

An image for one GPU architecture, or a few, has no device code for others, and says so in its
environment: COG_TRITON_SM, as nix/archs.nix names it. Without it, or with ``cpu``, there is
nothing to check. What an engine needs is in its manifest, or in part in its own config.json, which
has neither the GPU nor TensorRT's version; TensorRT itself checks only after loading.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import cuda_support, engine_manifest
from cog_triton.errors import EngineIncompatible
from cog_triton.system.gpus import hidden, installed_driver, nvidia_devices, visible_gpus

# Where NVIDIA's container keeps its Python packages, which our own Python does not see.
_CONTAINER_PACKAGES = "usr/local/lib/python3*/dist-packages"
# The architectures of nix/archs.nix, each with images cog-triton-runner-SM and -runner-vllm-SM.
RUNNER_SMS = (80, 86, 89, 90, 100, 103, 120)
_LIBRARIES = {"tensorrt_llm": "TensorRT-LLM", "tensorrt": "TensorRT"}


@dataclass(frozen=True, slots=True)
class Machine:
    """Inventory: `sm` of each GPU, `backends` of `tritonserver`, known library `versions`."""

    sm: Sequence[int]
    tritonserver: Path
    backends: Sequence[str]
    versions: Mapping[str, str]


def backends_in(directory: Path) -> list[str]:
    """Names of the Triton backends in a backend directory."""
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def library_versions(root: Path = Path("/")) -> dict[str, str]:
    """Versions of TensorRT-LLM and TensorRT, where known.

    TensorRT's is in TRT_VERSION in NVIDIA's containers; a package of this Python or of the
    container's tells it elsewhere, and TensorRT-LLM's.
    """
    paths = [*sys.path, *map(str, sorted(root.glob(_CONTAINER_PACKAGES)))]
    found = {"tensorrt": os.environ.get("TRT_VERSION", "")}
    for name in _LIBRARIES:
        packages = importlib.metadata.distributions(name=name, path=paths)
        found[name] = found.get(name) or next((package.version for package in packages), "")
    return {name: version for name, version in found.items() if version}


def require_image(image_sm: str | None) -> None:
    """Raise E1305 unless the image that this runs in can use the driver and the GPUs here."""
    if image_sm not in (None, "", "cpu"):
        require_driver()
        require_gpu(image_sm)


def require_driver() -> None:
    """Raise E1305 if the driver of a GPU here is too old for the CUDA of the image.

    Nothing is asked if CUDA_VISIBLE_DEVICES hides all.
    """
    cuda = cuda_support.cuda_of_image()
    if cuda and not hidden() and nvidia_devices():
        cuda_support.require_driver(cuda, installed_driver(), "this image")


def require_gpu(image_sm: str | None, found: Sequence[int] | None = None) -> None:
    """Raise E1305 unless every GPU that CUDA shows has a compute capability of `image_sm`.

    Args:
        image_sm: COG_TRITON_SM: ``86`` for 8.6, ``80,86`` for 8.0 and 8.6; empty, None and
            ``cpu`` ask for nothing.
        found: the SM of each visible GPU; the driver is asked if it is None.
    """
    if image_sm in (None, "", "cpu"):
        return
    found = visible_gpus() if found is None else found
    others = sorted({sm for sm in found if str(sm) not in image_sm.split(",")})
    if not found:
        raise EngineIncompatible(
            f"this image is for sm_{image_sm} and there is no GPU here: start it with"
            " `docker run --gpus=all`, on a machine with NVIDIA's driver and container toolkit"
        )
    if others:
        sm = others[0]
        advice = f"use the image cog-triton-runner-{sm}, for vLLM cog-triton-runner-vllm-{sm}"
        if sm not in RUNNER_SMS:
            advice = f"there are images for {sm_names(RUNNER_SMS)}, see docs/images.md"
        raise EngineIncompatible(
            f"this image is for sm_{image_sm}, this GPU is {sm_names(others)}: {advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of an engine; `world_size` is in GPUs, 0 for none, divided among `nodes`."""

    engine: Path | str
    backend: str
    world_size: int
    nodes: int = 1
    sm: Sequence[int] = ()
    versions: Mapping[str, str]


def needs_of(
    directory: Path, backend: str, world_size: int, versions: Mapping[str, str], nodes: int = 1
) -> Needs:
    """Requirements of the engine in `directory`; its manifest overrides `versions`.

    Raises:
        EngineCorrupt: the manifest is broken, or a file is missing or of another size.
    """
    manifest = engine_manifest.load(directory)
    if manifest is not None:
        engine_manifest.verify(directory, manifest)
    return Needs(
        engine=directory,
        backend=backend,
        world_size=world_size,
        nodes=nodes,
        sm=manifest.sm if manifest else (),
        versions={**versions, **(manifest.versions if manifest else {})},
    )


def require_engine(needs: Needs, here: Machine) -> list[str]:
    """Remarks on what could not be compared; raises E1305 with every difference, and what to do."""
    problems, remarks = [], []
    if needs.backend not in here.backends:
        problems.append(
            f"this Triton ({here.tritonserver}) has no {needs.backend} backend, it has"
            f" {', '.join(here.backends) or 'none'}: use a runner image, cog-triton-runner-SM, with"
            " the SM of the GPU"
        )
    if needs.world_size:
        if problem := gpu_problem(needs.engine, needs.sm, needs.world_size, needs.nodes, here.sm):
            problems.append(problem)
        elif not needs.sm:
            remarks.append(f"{needs.engine}: the GPU that it was built for is not recorded")
        for name, title in _LIBRARIES.items():
            built, found = needs.versions.get(name), here.versions.get(name)
            if not (built and found):
                side = "of the engine" if found else "of this machine"
                remarks.append(f"{title}'s version {side} is not known, so it was not compared")
            elif _differ(built, found):
                problems.append(
                    f"{needs.engine} was built by {title} {built}, here is {title} {found}:"
                    f" rebuild the engine, or use the runner image of {title} {built}"
                )
    if problems:
        raise EngineIncompatible("; ".join(problems))
    return remarks


def gpu_problem(
    engine: Path | str, sm: Sequence[int], world_size: int, nodes: int, here: Sequence[int]
) -> str | None:
    """Why an engine cannot run on the GPUs `here`, None if it can; an empty `sm` is any."""
    built = f"{engine} was built for {sm_names(sm)}" if sm else f"{engine} needs a GPU"
    if not here:
        return f"{built}, there is no GPU here"
    others = sorted(set(here) - set(sm)) if sm else []
    if others:
        return f"{built}, this machine has {sm_names(others)}: build the engine on such a GPU"
    wanted = -(-world_size // nodes)
    if len(here) < wanted:
        return f"{engine} has {world_size} ranks, a GPU for each: {len(here)} here"
    return None


def sm_names(sms: Sequence[int]) -> str:
    """SMs as text: ``sm_80, sm_90``."""
    return ", ".join(f"sm_{sm}" for sm in sms)


def _differ(one: str, other: str) -> bool:
    """Whether two versions differ in the numbers that both have; 10.14.1 is 10.14.1.48."""
    numbers = [re.split(r"[^\d.]", version)[0].strip(".").split(".") for version in (one, other)]
    return any(a != b for a, b in zip(*numbers, strict=False))
