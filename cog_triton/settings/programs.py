"""Settings of the machine: files, programs, ranks, and what builds find there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import Field

from cog_triton.errors import InvalidArgument
from cog_triton.settings.environment_types import (
    OptionalInt,
    OptionalPath,
    OptionalText,
    SettingsGroup,
)


class FileSettings(SettingsGroup):
    """Directories and programs of this machine."""

    title = "Files and programs"

    cog_triton_work_dir: OptionalPath = Field(
        None,
        description="Unpacked engines, Triton's log and the builder's steps are in this"
        " directory. Unset: `$XDG_CACHE_HOME/cog-triton`, else `~/.cache/cog-triton`.",
    )
    tritonserver: OptionalPath = Field(
        None, description="This is tritonserver's binary. Unset: the one that is found."
    )
    tritonserver_backend_dir: OptionalPath = Field(
        None,
        description="Triton's backends are in this directory. Unset: the one beside tritonserver.",
    )
    mpirun: OptionalPath = Field(
        None, description="This is Open MPI's mpirun. Unset: the one in `PATH`."
    )
    mpirun_args: str = Field("", description="mpirun gets these options, too.")

    @property
    def work_dir(self) -> Path:
        """Directory of unpacked engines and run-time files: COG_TRITON_WORK_DIR, else the cache."""
        if self.cog_triton_work_dir:
            return self.cog_triton_work_dir
        cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME", "") + "/.cache"
        home = Path(cache)
        try:
            usable = home if os.access(home.parent, os.W_OK) else Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise InvalidArgument(
                "COG_TRITON_WORK_DIR is unset, and neither the home directory nor /tmp can be"
                " written: set it to a directory that can"
            ) from error
        return usable / "cog-triton"


class RankSettings(SettingsGroup):
    """Ranks and machines of one engine."""

    title = "Several ranks"

    mpi_hosts: str | None = Field(
        None, description="The ranks run on these machines, this one first, with commas between."
    )
    cog_triton_rank: OptionalInt = Field(
        None,
        ge=0,
        description="Only this rank starts here; a launcher starts the others (multi-gpu.md).",
    )
    lws_leader_address: OptionalText = Field(
        None,
        description="Other nodes of a vLLM engine find this one by this address;"
        " LeaderWorkerSet sets it (multi-gpu.md).",
    )

    @property
    def mpi_host_names(self) -> list[str]:
        """MPI_HOSTS as a list."""
        return [host.strip() for host in (self.mpi_hosts or "").split(",") if host.strip()]


class BuilderSettings(SettingsGroup):
    """What builds need."""

    title = "The builder"

    cog_triton_output_dir: OptionalPath = Field(
        None,
        description="The builder's predictor writes engine.tar here. Unset: the working directory.",
    )
    build_cache_bytes: OptionalInt = Field(
        None,
        ge=0,
        description="When a build ends, it removes outputs of earlier builds, the longest unused"
        " first, until all outputs have at most this many bytes. Unset: twice the bytes of its own"
        " outputs, and outputs that were used in the last 7 days stay.",
    )
    cog_triton_step_python: OptionalPath = Field(
        None, description="Build steps run in this Python, with packages of its own."
    )
    trtllm_dir: OptionalPath = Field(
        None, description="TensorRT-LLM's sources are here; steps run scripts of their `examples`."
    )
