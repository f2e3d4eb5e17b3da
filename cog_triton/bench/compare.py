"""Comparison of two measurements: ratios, and which is better."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from cog_triton.bench.export import SCHEMA
from cog_triton.errors import InvalidArgument

SAME = 0.02
"""Ratios this near to 1 are called the same; what a machine's noise is, only repetition tells."""

_HIGHER = {
    "request throughput, /s": ("rates", "requests"),
    "output tokens, /s": ("rates", "output_tokens"),
    "goodput, /s": ("rates", "goodput"),
    "TPS per user, mean": ("metrics", "tps_per_user", "mean"),
    "single-stream TPS, mean": ("metrics", "single_stream_tps", "mean"),
}
_LOWER = {
    f"{title} {point}, ms": ("metrics", name, point)
    for title, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2el"))
    for point in ("mean", "p50", "p95", "p99")
}


def read(path: Path) -> Mapping[str, Any]:
    """Read a file of ``--json``; raises E1005 for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] == SCHEMA and document["runs"]:
            return dict(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"--compare={str(path)!r}: is no file of --json: {error!r}"
        ) from error
    raise InvalidArgument(f"--compare={str(path)!r}: is of another version of --json")


def table(first: Path, second: Path) -> Table:
    """Comparison table: a row for each metric and rate that both have."""
    a, b = read(first), read(second)
    found = Table(title=f"A = {first}, B = {second}")
    for name in ("rate", "metric", "A", "B", "B / A", "better"):
        found.add_column(name, justify="left" if name in ("metric", "better") else "right")
    others = {run["rate"]: run for run in b["runs"]}
    shared = [(run, others[run["rate"]]) for run in a["runs"] if run["rate"] in others]
    if not shared:
        raise InvalidArgument(f"--compare: {first} and {second} have no rate in common")
    for mine, its in shared:
        for rows, higher in ((_HIGHER, True), (_LOWER, False)):
            for title, place in rows.items():
                x, y = _at(mine, place), _at(its, place)
                if x is not None and y is not None:
                    scale = 1000 if title.endswith("ms") else 1
                    cells = (f"{x * scale:.3f}", f"{y * scale:.3f}")
                    found.add_row(f"{mine['rate']:g}", title, *cells, *_verdict(x, y, higher))
        x, y = _failure_rate(mine), _failure_rate(its)
        cells = (f"{x:.3f}", f"{y:.3f}")
        found.add_row(f"{mine['rate']:g}", "failure rate", *cells, *_verdict(x, y, False))
    return found


def differences(first: Path, second: Path) -> list[str]:
    """Options that differ, as ``name: A, B``."""
    a, b = read(first)["options"], read(second)["options"]
    names = sorted(a.keys() | b.keys())
    return [f"{name}: {a.get(name)}, {b.get(name)}" for name in names if a.get(name) != b.get(name)]


def _failure_rate(run: Mapping[str, Any]) -> float:
    return float(run["failed"] / max(1, run["failed"] + run["completed"]))


def _verdict(a: float, b: float, higher: bool) -> tuple[str, str]:
    if a <= 0:
        return "-", "same" if a == b else "B" if (b > a) is higher else "A"
    ratio = b / a
    if abs(ratio - 1) <= SAME:
        return f"{ratio:.3f}", "same"
    return f"{ratio:.3f}", "B" if (ratio > 1) is higher else "A"


def _at(run: Mapping[str, Any], place: tuple[str, ...]) -> float | None:
    value: Any = run
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None
