"""Seal of an engine: what its compilers left on one kind of GPU, and what that fits.

Its files are below ``sealed/NAME/`` of the engine, as they lay below the directory of
`cog_triton.engines.vllm.compiler_caches`. They are code, a pickle among them: whoever opens them
checks first that they may be trusted, and that they are the manifest's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

DIRECTORY = "sealed"
"""Directory of all seals, from the engine's."""
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_WORDS = re.compile(r"[^a-z0-9]+")
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Words = Annotated[str, StringConstraints(pattern=r"^[ -~]{0,256}$")]
"""What a seal says of machine and versions: a line that a terminal can show."""
SealName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,127}$")]
VARIABLE = re.compile(r"(VLLM|TORCHINDUCTOR|NCCL)_[A-Z0-9_]{1,100}")
Variable = Annotated[str, StringConstraints(pattern=f"^{VARIABLE.pattern}$")]
"""Variable of an engine that a build config may set, as it is started with it when served."""


class Environment(BaseModel):
    """What compiled code is for: all of it must be the same where it is used.

    `packages` is the digest of all that is installed with vLLM: what a lock pins, names, versions
    and, by the sums in their wheels, the files.
    `python` has its patch level, which torch compares, too; `gpu_name` is the driver's, as torch
    has it. What could not be told is empty.
    """

    model_config = _STRICT

    vllm: Words
    torch: Words
    triton: Words
    cuda: Words
    python: Words
    packages: Sha256
    gpu_name: Words
    sm: int = Field(ge=0, lt=1000)
    ranks: int = Field(ge=1, le=1024)


class Seal(BaseModel):
    """A seal: its `environment`, the oldest driver, and how it was proven.

    `aot` are vLLM's own hashes of what it compiled, as it named its directories by them. `seconds`
    are those of the start that proved it, and of the one that compiled; `apart` says whether
    another user than that of the build proved it.
    """

    model_config = _STRICT

    environment: Environment
    driver: Words
    aot: list[Sha256]
    compile_seconds: float
    seconds: float
    apart: bool

    def misfits(self, here: Environment, driver: str | None) -> list[str]:
        """What differs `here`, in words; none if the seal can be used."""
        found = []
        for name in Environment.model_fields:
            sealed, now = getattr(self.environment, name), getattr(here, name)
            if name == "packages" and sealed != now:
                found.append("other packages are installed beside vLLM")
            elif sealed != now:
                found.append(f"{name} {sealed or 'unknown'} (here {now or 'unknown'})")
        if driver is not None and _numbers(driver) < _numbers(self.driver):
            found.append(f"driver {self.driver} or newer (here {driver})")
        return found


def seal_name(environment: Environment) -> str:
    """Name of a seal's directory: GPU, SM and ranks, as ``nvidia-h200-sm90-x2``."""
    gpu = _WORDS.sub("-", environment.gpu_name.lower()).strip("-") or "gpu"
    return f"{gpu[:100]}-sm{environment.sm}-x{environment.ranks}"


def files_of(name: str, files: Mapping[str, object]) -> list[str]:
    """Those of an engine's `files` that are the seal's, sorted."""
    return sorted(file for file in files if seal_of(file) == name)


def seal_of(file: str) -> str | None:
    """Name of the seal that a file of an engine is a part of; None for what is of none."""
    parts = file.split("/", 2)
    return parts[1] if len(parts) == 3 and parts[0] == DIRECTORY else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
