"""Inventory of this machine for an engine: GPUs, Triton backends, NVIDIA's libraries."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Where NVIDIA's container keeps its Python packages, which our own Python does not see.
_CONTAINER_PACKAGES = "usr/local/lib/python3*/dist-packages"


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
    found = {"tensorrt": os.environ.get("TRT_VERSION", "")}
    paths = [*sys.path, *map(str, sorted(root.glob(_CONTAINER_PACKAGES)))]
    for name in ("tensorrt_llm", "tensorrt"):
        found[name] = found.get(name) or _package_version(name, paths)
    return {name: version for name, version in found.items() if version}


def _package_version(name: str, paths: Iterable[str]) -> str:
    packages = importlib.metadata.distributions(name=name, path=list(paths))
    return next((package.version for package in packages), "")
