"""Arrival schedule of an open loop: due times in seconds from the start."""

from __future__ import annotations

from array import array
from random import Random

_MOST = 10_000_000


def offsets(
    rate: float, *, poisson: bool, seed: int, duration: float | None, requests: int | None
) -> array[float]:
    """Due times at `rate` requests a second, before `duration` seconds and at most `requests`.

    Poisson arrivals have independent, exponentially distributed gaps, as those of many users who
    know nothing of each other; constant ones are 1/rate apart. One of the limits is given.
    """
    random = Random(seed)
    found = array("d")
    end = float("inf") if duration is None else duration
    at = random.expovariate(rate) if poisson else 0.0
    while at < end and len(found) < (_MOST if requests is None else requests):
        found.append(at)
        at = at + random.expovariate(rate) if poisson else len(found) / rate
    return found
