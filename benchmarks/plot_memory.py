"""Plot of a soak's memory samples: each part's MB over time, and the requests so far.

.venv/bin/python benchmarks/plot_memory.py .work/bench/soak_mixed.jsonl docs/memory.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from _memory_samples import Sample, load
from matplotlib import colormaps
from matplotlib.figure import Figure

_LABEL_GAP = 0.045


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Write the plot to `path`, whose suffix names the format."""
    figure = Figure(figsize=(10, 6), dpi=90, layout="constrained")
    axes, below = figure.subplots(2, 1, height_ratios=[5, 1], sharex=True)
    axes.set_prop_cycle(color=colormaps["Dark2"].colors + colormaps["tab10"].colors)
    minutes = [sample.seconds / 60 for sample in samples]
    last = samples[-1].megabytes
    parts = sorted((part for part in last if part != "others"), key=lambda part: -last[part])
    for part in parts:
        axes.plot(minutes, [sample.megabytes.get(part) for sample in samples], linewidth=1.2)
    top = max(mb for sample in samples for part, mb in sample.megabytes.items() if part in parts)
    axes.set_ylim(0, top * 1.05)
    lines = axes.get_lines()
    for part, line, height in zip(
        parts, lines, _spread([last[p] / top for p in parts]), strict=True
    ):
        axes.annotate(
            f"{part} {last[part]:.0f}",
            (1.01, height / 1.05),
            xycoords="axes fraction",
            color=line.get_color(),
            va="center",
            fontsize=8,
        )
    axes.set_ylabel("MB, without files")
    below.plot(minutes, [sample.requests / 1000 for sample in samples], color="#555555")
    below.set_ylabel("requests,\nthousands")
    below.set_xlabel("minutes")
    below.set_xlim(0, minutes[-1])
    for panel in (axes, below):
        panel.grid(visible=True, color="#e6e6e6", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _spread(heights: Sequence[float]) -> list[float]:
    """Heights of labels, from the highest down, with a gap between two, none below the axis."""
    placed: list[float] = []
    for height in heights:
        placed.append(min(height, placed[-1] - _LABEL_GAP) if placed else height)
    floor = 0.0
    for place in reversed(range(len(placed))):
        placed[place] = max(placed[place], floor)
        floor = placed[place] + _LABEL_GAP
    return placed


def main() -> None:
    """Plot the file that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("samples", type=Path, help="written by soak_mixed.py --samples")
    parser.add_argument("plot", type=Path, help="file to write: .png or .svg")
    options = parser.parse_args()
    plot(load(options.samples), options.plot)


if __name__ == "__main__":
    main()
