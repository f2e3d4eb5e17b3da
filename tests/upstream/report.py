"""Report on a tree of TensorRT-LLM, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from upstream.conversion_runs import Conversion
from upstream.engine_builds import Built

_MOST = 3


def markdown(
    version: str,
    conversions: Sequence[Conversion],
    built: Sequence[Built],
) -> str:
    """A table of families."""
    sizes = sorted({c.tp for c in conversions})
    builds = {b.family: b for b in built}
    header = ["family", *(f"tensors, tp {tp}" for tp in sizes), "built"]
    rows = []
    for family in dict.fromkeys(c.family for c in conversions):
        cells = {c.tp: _result(c) for c in conversions if c.family == family}
        engine = builds.get(family)
        of_build = "-" if engine is None else engine.problem or f"tp {engine.tp}"
        rows.append([family, *(cells.get(tp, "-") for tp in sizes), of_build])
    return f"## TensorRT-LLM {version}\n\n{_table(header, rows)}"


def _result(conversion: Conversion) -> str:
    if conversion.stopped:
        return conversion.stopped
    found = conversion.differences
    return "equal" if not found else f"{len(found)} differ: {'; '.join(found[:_MOST])}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *lines])
