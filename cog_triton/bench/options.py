"""Options of a benchmark run, validated, and the prompts that they ask for."""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from cog_triton.errors import InvalidArgument

_FORM = re.compile(r"(?:uniform:)?(\d+)(?:-(\d+))?")
_ID_RANGE = range(100, 900)
"""Random token ids; every vocabulary in use has these."""
_WORDS = tuple(
    """
    the quick brown fox over lazy dog and of to in is that for it on with as at by from this
    be are was or an have not you we all one time can new more out up about who get which go
    me when make like no just him know take people into year your good some could them see
    other than then now look only come its think also back after use two how our work first
    well way even want because any these give day most us water light house night world hand
    part place story small large long right left high low old great same last own state city
    line
    """.split()  # noqa: SIM905 - a line of text reads better than a column of words
)


class Lengths(NamedTuple):
    """Lengths from `low` to `high`, each as likely as the others; `text` is the option's value."""

    text: str
    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> Lengths:
        """Parse a value; raises E1005 naming the option `name`."""
        found = _FORM.fullmatch(text.strip())
        low = int(found[1]) if found else 0
        high = int(found[2] or low) if found else 0
        if not 1 <= low <= high:
            raise InvalidArgument(f"{name}={text!r}: must be N or uniform:LOW-HIGH, at least 1")
        return cls(text.strip(), low, high)

    def draw(self, random: Random) -> int:
        """Draw one length."""
        return random.randint(self.low, self.high)


class TargetName(enum.StrEnum):
    """Kind of server to measure."""

    COG = "cog-triton"
    TRITON = "triton"
    OPENAI = "openai"


_PORTS = {
    TargetName.COG: ("PORT", 5000),
    TargetName.TRITON: ("TRITON_HTTP_PORT", 8000),
    TargetName.OPENAI: ("OPENAI_PORT", 8080),
}


class Unit(enum.StrEnum):
    """Unit of `rate`."""

    RPS = "rps"
    BATCH = "batch"
    CONCURRENCY = "concurrency"


class OutputMethod(enum.StrEnum):
    """Whether an answer is streamed, or comes whole at its end."""

    YIELD = "yield"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one run; times in seconds. None means "not given"."""

    url: str
    target: TargetName = TargetName.COG
    unit: Unit = Unit.RPS
    rate: float = 1.0
    duration: float | None = None
    requests: int | None = None
    warmup: int = 1
    seed: int = 0
    timeout: float = 600.0
    input_lengths: Lengths
    output_lengths: Lengths
    tps: float | None = None
    output_method: OutputMethod = OutputMethod.YIELD
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate values and their combinations; raises E1005."""
        for name in ("rate", "duration", "requests", "timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidArgument(f"--{name}={value}: must be above 0")
        if self.duration is None and self.requests is None:
            raise InvalidArgument("--duration, --requests: one of them must be given")
        if self.unit is not Unit.RPS and self.rate != int(self.rate):
            raise InvalidArgument(
                f"--rate={self.rate:g}: must be a whole number with --unit {self.unit.value}"
            )

    @property
    def streamed(self) -> bool:
        """Whether answers are asked for as streams."""
        return self.output_method is OutputMethod.YIELD


def default_url(target: TargetName) -> str:
    """Base URL without --url: this machine, with the port of the settings."""
    setting, port = _PORTS[target]
    return f"http://127.0.0.1:{os.environ.get(setting) or port}"


def parse_inputs(pairs: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs, values being JSON or else text; raises E1005."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"--input={pair!r}: must be NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


class Prompt(NamedTuple):
    """A prompt: text, token ids for models that take no text, and how many tokens to ask for."""

    text: str
    ids: tuple[int, ...]
    output_tokens: int


def make_prompt(options: Options, index: int) -> Prompt:
    """The prompt of request `index`, the same for the same seed; negative ones are warm-ups'."""
    random = Random(f"{options.seed}:{index}")
    length = options.input_lengths.draw(random)
    wanted = options.output_lengths.draw(random)
    ids = tuple(random.choices(_ID_RANGE, k=length))
    return Prompt(" ".join(random.choices(_WORDS, k=length)), ids, wanted)
