"""Options of a benchmark run, validated, and length distributions of prompts and answers."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from cog_triton.errors import InvalidArgument

_LENGTHS_RULE = "must be N, uniform:LOW-HIGH, normal:MEAN,STD or lognormal:MEDIAN,SIGMA, at least 1"
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Length distribution; `text` is the option's value. Lengths are whole and at least 1.

    SIGMA of ``lognormal`` is the standard deviation of the logarithm.
    """

    text: str
    kind: str
    first: float
    second: float

    @property
    def fixed(self) -> int | None:
        """The length, if the distribution has only one."""
        return int(self.first) if self.kind == "fixed" else None

    def draw(self, random: Random) -> int:
        """Draw one length."""
        return max(1, round(_DRAW[self.kind](random, self.first, self.second)))

    def __str__(self) -> str:
        return self.text


_DRAW: dict[str, Callable[[Random, float, float], float]] = {
    "fixed": lambda random, first, second: first,
    "uniform": lambda random, first, second: random.randint(int(first), int(second)),
    "normal": lambda random, first, second: random.gauss(first, second),
    "lognormal": lambda random, first, second: first * random.lognormvariate(0, second),
}
_FORMS = {
    "fixed": re.compile(r"(\d+)()"),
    "uniform": re.compile(r"uniform:(\d+)-(\d+)"),
    "normal": re.compile(rf"normal:{_NUMBER},{_NUMBER}"),
    "lognormal": re.compile(rf"lognormal:{_NUMBER},{_NUMBER}"),
}


def parse_lengths(name: str, text: str) -> Lengths:
    """Parse a distribution; raises E1005 naming the option `name`."""
    for kind, form in _FORMS.items():
        if match := form.fullmatch(text.strip()):
            first, second = float(match[1]), float(match[2] or 0)
            if first >= 1 and (kind != "uniform" or second >= first):
                return Lengths(text.strip(), kind, first, second)
    raise InvalidArgument(f"{name}={text!r}: {_LENGTHS_RULE}")


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
