"""Service level objectives (SLO): limits in milliseconds for goodput."""

from __future__ import annotations

from collections.abc import Mapping

from cog_triton.errors import InvalidArgument, nearest

NAMES = ("ttft", "tpot", "e2el")


def parse(text: str) -> dict[str, float]:
    """Parse ``ttft:200,tpot:50`` into milliseconds by name; raises E1005."""
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition(":")
        if name not in NAMES:
            raise InvalidArgument(
                f"--slo={text!r}: {name!r} must be one of {', '.join(NAMES)}"
                f"{nearest(name, list(NAMES))}"
            )
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1
        if not limits[name] > 0:
            raise InvalidArgument(f"--slo={text!r}: {name} must be milliseconds above 0")
    return limits


def met(limits: Mapping[str, float], seconds: Mapping[str, float | None]) -> bool:
    """Whether a request with these times meets all limits; an unknown time meets none."""
    for name, limit in limits.items():
        value = seconds.get(name)
        if value is None or value * 1000 > limit:
            return False
    return True
