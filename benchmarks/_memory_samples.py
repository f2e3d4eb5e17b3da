"""Memory of each part of a server over time: samples, and whether a part grew."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import _resource_usage

PLATEAU = (1 / 3, 1 / 2)
"""Share of a run by which caches are full and malloc has its arenas; later growth is a leak."""
END = (5 / 6, 1.0)
TOLERANCE, TOLERANCE_MB = 0.05, 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server: MB of each part without files, seconds and requests so far.

    `cpu` is the CPU seconds of all parts, `descriptors` their open files.
    """

    seconds: float
    requests: int
    cpu: float
    descriptors: int
    megabytes: dict[str, float]


def take(root: int, seconds: float, requests: int, descriptors: int) -> Sample:
    """Look at all processes below `root`; reading them takes some 20 ms."""
    held = _resource_usage.memory_bytes(root)
    megabytes = {part: round(used / 1e6, 2) for part, used in sorted(held.items())}
    cpu = sum(_resource_usage.cpu_seconds(root).values())
    return Sample(round(seconds, 1), requests, round(cpu, 2), descriptors, megabytes)


def append(path: Path, sample: Sample) -> None:
    """Add a sample to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(sample)) + "\n")


def median_mb(samples: Sequence[Sample], part: str, of_run: tuple[float, float]) -> float:
    """Median of a part's MB in a share of the run; 0 if it did not run then."""
    last = samples[-1].seconds
    low, high = (share * last for share in of_run)
    found = [s.megabytes[part] for s in samples if low <= s.seconds <= high and part in s.megabytes]
    return statistics.median(found) if found else 0.0


def growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """MB on the plateau and at the end of each part."""
    parts = sorted({part for sample in samples for part in sample.megabytes})
    return {
        part: (median_mb(samples, part, PLATEAU), median_mb(samples, part, END)) for part in parts
    }


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Parts whose memory at the end exceeds that of the plateau by more than the tolerance."""
    return [
        f"memory of {part}: {end:.1f} MB, {plateau:.1f} on the plateau"
        for part, (plateau, end) in growth(samples).items()
        if plateau and end > plateau * (1 + TOLERANCE) + TOLERANCE_MB
    ]
