"""Length distributions of prompts and answers, in tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from cog_triton.errors import InvalidArgument

_RULE = "must be N, uniform:LOW-HIGH, normal:MEAN,STD or lognormal:MEDIAN,SIGMA, at least 1"
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


def parse(name: str, text: str) -> Lengths:
    """Parse a distribution; raises E1005 naming the option `name`."""
    for kind, form in _FORMS.items():
        if match := form.fullmatch(text.strip()):
            first, second = float(match[1]), float(match[2] or 0)
            if first >= 1 and (kind != "uniform" or second >= first):
                return Lengths(text.strip(), kind, first, second)
    raise InvalidArgument(f"{name}={text!r}: {_RULE}")
