"""Identity of an engine across servers: all that must be the same for one to take over another's.

Files count by path, size and time of change, not by content, which would take as long to read as
to load. Variables of the environment count where their names say that an engine reads them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import cog_triton
from cog_triton.engines.adapter_registry import REGISTRY
from cog_triton.keeper.adoption import ParkingPlace
from cog_triton.settings import Settings
from cog_triton.system.secret_variables import is_secret
from cog_triton.triton.model_repository import ENGINE_MODEL, read_config

_log = logging.getLogger(__name__)
_READ = re.compile(
    r"(CUDA|NVIDIA|NCCL|VLLM|TORCH|TORCHINDUCTOR|PYTORCH|TRITON_CACHE|HF|TRANSFORMERS|OPENVINO|OV"
    r"|OMP|MKL|LD|PYTHON)(_.*|PATH)?|PYTHONHASHSEED"
)
_VLLM_MODEL = "vllm_model"
_MODEL_JSON = "model.json"


def engine_identity(repository: Path, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Identity of the engine of a rendered `repository`, by name of what it consists of.

    None for one with LoRA adapters, whose files end with their server.
    """
    config = read_config(repository / ENGINE_MODEL / "config.pbtxt")
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    if REGISTRY in parameters:
        return None
    found = {f"parameter {name}": value for name, value in parameters.items()}
    found["the version of cog-triton"] = cog_triton.__version__
    found["the code of cog-triton"] = _files(Path(cog_triton.__file__).parent, "*.py")
    found["the Python"] = sys.executable
    found["the uid"] = str(os.getuid())
    vllm = repository / _VLLM_MODEL / "config.pbtxt"
    if vllm.is_file():
        version = read_config(vllm).parameters["vllm_version"].string_value
        found["the version of vLLM"] = version
    else:
        found["the version of OpenVINO"] = _version("openvino")
    if directory := parameters.get("engine_dir"):
        found["the engine's files"] = _files(Path(directory))
        if (weights := _weights(Path(directory))) is not None:
            found["the weights"] = f"{weights}: {_files(weights)}"
    for name, value in environment.items():
        if _READ.fullmatch(name) and not is_secret(name):
            found[f"variable {name}"] = value
    return found


def parking_place(settings: Settings, repository: Path) -> ParkingPlace | None:
    """Place of this server in its parking lot; None, with a warning, for one that has none."""
    if not settings.park_engine:
        return None
    if not settings.cog_triton_parking:
        _log.warning("PARK_ENGINE: only `cog-triton serve` parks; nothing outlives this container")
        return None
    identity = engine_identity(repository, os.environ)
    if identity is None:
        _log.warning("PARK_ENGINE: an engine with LoRA adapters is not parked")
        return None
    weights = Path(settings.cog_weights or settings.engine_dir).name
    model = settings.served_model_name or settings.cog_triton_engine or weights
    return ParkingPlace(settings.work_dir, settings.cog_triton_parking, model, identity)


def _weights(directory: Path) -> Path | None:
    """The directory that ``model.json`` names, if it is one of this machine."""
    try:
        named = json.loads((directory / _MODEL_JSON).read_text("utf-8")).get("model")
    except (OSError, ValueError, AttributeError):
        return None
    path = directory / named if isinstance(named, str) else directory
    return path.resolve() if isinstance(named, str) and path.is_dir() else None


def _files(directory: Path, pattern: str = "*") -> str:
    """Fingerprint of the files below `directory`."""
    listed = []
    for path in sorted(directory.rglob(pattern)):
        if path.is_file():
            stat = path.stat()
            listed.append(f"{path.relative_to(directory)} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
