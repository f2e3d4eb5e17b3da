"""Options of a benchmark run, validated."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cog_triton.bench.length_distribution import Lengths
from cog_triton.errors import InvalidArgument


class TargetName(enum.StrEnum):
    """Kind of server to measure."""

    COG = "cog-triton"
    TRITON = "triton"
    OPENAI = "openai"


class Unit(enum.StrEnum):
    """Unit of `rate`."""

    RPS = "rps"
    BATCH = "batch"
    CONCURRENCY = "concurrency"


class Arrival(enum.StrEnum):
    """Arrival process of an open loop."""

    POISSON = "poisson"
    CONSTANT = "constant"


class OutputMethod(enum.StrEnum):
    """Output mode of a mock server: token by token, whole, or in pieces."""

    YIELD = "yield"
    WAIT = "wait"
    BUFFER = "buffer"


class API(enum.StrEnum):
    """Endpoint of OpenAI's API."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one run; times in seconds. None means "not given"."""

    url: str
    target: TargetName = TargetName.COG
    unit: Unit = Unit.RPS
    rate: float = 1.0
    duration: float | None = None
    requests: int | None = None
    arrival: Arrival = Arrival.POISSON
    batch_pause: float = 1.0
    warmup: int = 1
    seed: int = 0
    timeout: float = 600.0
    input_lengths: Lengths
    output_lengths: Lengths | None = None
    prompt_file: Path | None = None
    tokenizer: Path | None = None
    tps: float | None = None
    output_method: OutputMethod | None = None
    buffer_size: int | None = None
    stream: bool = True
    ignore_eos: bool | None = None
    model: str | None = None
    api: API = API.CHAT
    api_key: str | None = field(default=None, repr=False)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    slo: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate values and their combinations; raises E1005."""
        rules = {
            "rate": (self.rate > 0, "must be above 0"),
            "duration": (self.duration is None or self.duration > 0, "must be above 0"),
            "requests": (self.requests is None or self.requests > 0, "must be above 0"),
            "timeout": (self.timeout > 0, "must be above 0"),
            "batch_pause": (self.batch_pause >= 0, "must not be negative"),
            "tps": (self.tps is None or self.tps >= 0, "must not be negative; 0 is flat out"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise InvalidArgument(f"--{name.replace('_', '-')}={getattr(self, name)}: {rule}")
        if self.duration is None and self.requests is None:
            raise InvalidArgument("--duration, --requests: one of them must be given")
        if self.unit is not Unit.RPS and self.rate != int(self.rate):
            raise InvalidArgument(
                f"--rate={self.rate:g}: must be a whole number with --unit {self.unit.value}"
            )
        if self.buffer_size is not None and self.output_method is not OutputMethod.BUFFER:
            raise InvalidArgument(
                f"--buffer-size={self.buffer_size}: goes with --output-method buffer"
            )

    @property
    def streamed(self) -> bool:
        """Whether answers are asked for as streams."""
        return self.stream and self.output_method is not OutputMethod.WAIT
