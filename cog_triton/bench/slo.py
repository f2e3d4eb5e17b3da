"""Service level objectives: limits in milliseconds that a good request stays within."""

from __future__ import annotations

from collections.abc import Mapping

from cog_triton.errors import InvalidArgument, nearest

NAMES = ("ttft", "tpot", "e2el")


def parse(text: str) -> dict[str, float]:
    """``ttft:200,tpot:50`` as milliseconds by name; raises E1005 for what is no objective."""
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
    """Whether a request with these times was good; a time that nobody knows meets no limit."""
    for name, limit in limits.items():
        value = seconds.get(name)
        if value is None or value * 1000 > limit:
            return False
    return True
