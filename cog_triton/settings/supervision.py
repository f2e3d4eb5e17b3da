"""Settings of supervision: probes, restarts, resumption, spare engines, swaps, drains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cog_triton.environment_types import OptionalInt, OptionalPath, OptionalText, SettingsGroup


class SupervisionSettings(SettingsGroup):
    """When Triton and engines are restarted, spared, swapped and stopped."""

    title = "Supervision and shutdown"

    triton_timeout: float = Field(
        120, gt=0, description="Seconds without a byte from Triton before a request fails (E2101)."
    )
    triton_start_timeout: float = Field(
        300, gt=0, description="Seconds until Triton must be ready (E2106)."
    )
    triton_probe_period: float = Field(
        1, gt=0, description="Seconds between liveness probes of Triton."
    )
    triton_probe_timeout: float = Field(
        3, gt=0, description="Seconds until a probe without an answer means that Triton hangs."
    )
    triton_max_restarts: int = Field(
        5, ge=0, description="Failed restarts in a row before the server exits; 0: none is tried."
    )
    resume: bool = Field(
        True,
        description="Whether generations whose engine dies wait for its restart, and go on"
        " (supervision.md); 0 ends them with E2105.",
    )
    resume_timeout: float = Field(300, gt=0, description="Seconds that they wait, from each death.")
    engine_replicas: int = Field(
        1, ge=1, le=64, description="Engines of the model, not of TensorRT-LLM (multi-gpu.md)."
    )
    spare_engine: bool = Field(False, description="A second engine to take over (parking.md).")
    park_checkpoint: bool = Field(
        True, description="Parked engines leave the GPU; else they only sleep (parking.md)."
    )
    swap_residence: float = Field(5, ge=0, description="Least seconds of a model's turn (--swap).")
    swap_drain: float = Field(60, ge=0, description="Seconds to end a turn in; then E2105.")
    cog_triton_swap: OptionalText = Field(None, description="Other models of --swap, as JSON.")
    cog_triton_engine_keeper_name: OptionalText = Field(None, description="Set to swap models.")
    triton_memory_limit: OptionalInt = Field(
        None,
        ge=1,
        description="MiB that tritonserver or a stub may hold; beyond, Triton is restarted once"
        " nothing runs, or after five minutes, and generations go on (supervision.md). Unset: no"
        " limit.",
    )
    cog_probe_period: float = Field(
        1, gt=0, description="Seconds between liveness probes of Cog, parent and worker."
    )
    cog_probe_timeout: float = Field(
        5, gt=0, description="Seconds until a probe of Cog without an answer has failed."
    )
    cog_probe_failures: int = Field(
        3, ge=1, description="Failed probes of Cog in a row before the server exits (E2105)."
    )
    drain_timeout: float = Field(
        25, ge=0, description="Seconds that running requests get to end in, once told to stop."
    )
    cog_triton_drain_file: OptionalPath = Field(None, description="File that asks for a drain.")
    canary: Literal["off", "warn", "require"] = Field(
        "warn",
        description="What follows if the engine answers its canary otherwise than when built:"
        " `warn` logs E2112, `require` does not start; `off` does not ask it (rolling.md).",
    )
