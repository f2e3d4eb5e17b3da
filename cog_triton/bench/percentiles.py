"""Summary statistics: percentiles, and concurrency weighted by time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a sample; percentiles are interpolated linearly, `std` is the population's."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def summarize(values: Iterable[float | None]) -> Summary | None:
    """Summarize the values that are not None; None if there are none."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if not known.size:
        return None
    p50, p90, p95, p99 = (float(point) for point in np.percentile(known, [50, 90, 95, 99]))
    return Summary(
        count=known.size,
        mean=float(known.mean()),
        std=float(known.std()),
        min=float(known.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(known.max()),
    )


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Number of requests in flight, weighted by time."""

    mode: int
    mean: float
    median: float
    max: int
    min: int


def concurrency(
    spans: Sequence[tuple[float, float]], start: float, end: float
) -> Concurrency | None:
    """Concurrency of requests with these (begin, end), from `start` to `end`; None if empty."""
    changes = [(min(max(at, start), end), step) for a, b in spans for at, step in ((a, 1), (b, -1))]
    lasted: dict[int, float] = {}
    level, before = 0, start
    for at, step in [*sorted(changes), (end, 0)]:
        if at > before:
            lasted[level] = lasted.get(level, 0.0) + at - before
            before = at
        level += step
    total = sum(lasted.values())
    if not total:
        return None
    passed, median = 0.0, 0
    for value in sorted(lasted):
        passed += lasted[value]
        median = value
        if passed >= total / 2:
            break
    return Concurrency(
        mode=max(lasted, key=lambda value: lasted[value]),
        mean=sum(value * seconds for value, seconds in lasted.items()) / total,
        median=float(median),
        max=max(lasted),
        min=min(lasted),
    )
