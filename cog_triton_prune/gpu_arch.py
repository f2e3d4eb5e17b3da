"""GPU architectures: which device code runs on which GPU.

Source: CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility" and
"Architecture- and family-specific features".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from cog_triton.errors import InvalidArgument

# Integrated GPUs (Jetson, DRIVE, Thor): "binary compatibility between desktop and Tegra is not
# supported", in either direction. sm_88 is taken for one, which only ever keeps more.
_INTEGRATED = frozenset({53, 62, 72, 87, 88, 101, 110})


class Arch(NamedTuple):
    """Architecture that code is compiled for: SM number (86 is compute capability 8.6), variant.

    `variant` is "a" for architecture-specific code (sm_90a), "f" for family-specific (sm_100f).
    """

    number: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.number}{self.variant}"

    def runs_on(self, sm: int) -> bool:
        """Whether a cubin runs on `sm`: same major version, same or higher minor, unless "a".

        A family ("f") lies within one major version, so the rule is the same for it.
        """
        if self.variant == "a" or {self.number, sm} & _INTEGRATED:
            return self.number == sm
        return self.number // 10 == sm // 10 and self.number <= sm

    def compiles_for(self, sm: int) -> bool:
        """Whether a driver can compile this PTX for `sm`: plain PTX for any later GPU."""
        return self.runs_on(sm) if self.variant else self.number <= sm


def parse_sms(text: str) -> tuple[int, ...]:
    """Parse SMs with commas between them, as in "80,sm_86,9.0", the lowest first.

    Raises:
        InvalidArgument: one of them is not an SM.
    """
    return tuple(sorted({_parse_sm(part) for part in text.split(",")}))


def sm_text(sms: Sequence[int]) -> str:
    """SMs as they are shown: ``sm_80,86``."""
    return "sm_" + ",".join(map(str, sms))


def _parse_sm(text: str) -> int:
    if match := re.fullmatch(r"(?:sm_)?([1-9]\d{1,2})|([1-9]\d?)\.(\d)", text.strip()):
        return int(match[1] or match[2] + match[3])
    variant = re.fullmatch(r"(?:sm_)?((\d{2,3})[af])", text.strip())
    hint = f"; for this GPU say {variant[2]}: code for sm_{variant[1]} is kept" if variant else ""
    raise InvalidArgument(
        f"SM={text!r}: must be a GPU's compute capability, as 86, sm_86 or 8.6{hint}"
    )
