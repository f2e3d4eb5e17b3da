"""Plots: latency distributions, TTFT over time, and throughput of a sweep."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cog_triton.bench.load_generator import RunResult
from cog_triton.bench.options import Options
from cog_triton.bench.request_record import FAILED, OK, Record
from cog_triton.bench.run_metrics import RunMetrics
from cog_triton.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Level = tuple[Options, RunResult, RunMetrics]
_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _GREY = (
    *("#2f6db5", "#d9822b", "#3a8f4d", "#8a5aa8", "#c8322f", "#8a8a8a"),
)
_LATENCIES = {
    "ttft": ("TTFT", _BLUE),
    "itl": ("ITL", _ORANGE),
    "tpot": ("TPOT", _GREEN),
    "e2el": ("E2E latency", _PURPLE),
}
_DOTS = 4000
"""Maximum number of dots; more are thinned out."""
_LEAST = 100
"""Values of which the 99th percentile is shown: it is the largest of fewer."""


def require() -> None:
    """Raise E1401 unless matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "--plot needs matplotlib: pip install 'cog-triton[bench]' (or pip install matplotlib)"
        ) from error


def png(levels: Sequence[Level], subject: str) -> bytes:
    """PNG of a run, or of a sweep's runs; `subject` is what was measured, where and when."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    options = levels[0][0]
    with rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold"}):
        if len(levels) == 1:
            figure = Figure(figsize=(13, 7.2), dpi=130, layout="constrained")
            grid = figure.add_gridspec(2, len(_LATENCIES))
            spreads = [figure.add_subplot(grid[0, place]) for place in range(len(_LATENCIES))]
            _spreads(spreads, levels[0][1])
            _over_time(figure.add_subplot(grid[1, :]), levels)
        else:
            figure = Figure(figsize=(14, 8), dpi=130, layout="constrained")
            (first, *times), (last, third, fourth) = figure.subplots(2, 3)
            _throughput(first, levels)
            for axes, name in zip([*times, last], ("ttft", "tpot", "e2el"), strict=True):
                _times(axes, levels, name)
            _spread_by_level(third, levels)
            _over_time(fourth, levels)
        figure.suptitle(f"{subject}\n{_title(options, levels)}", fontsize=12)
        out = io.BytesIO()
        figure.savefig(out, format="png")
    return out.getvalue()


def _title(options: Options, levels: Sequence[Level]) -> str:
    rates = ", ".join(f"{own.rate:g}" for own, _, _ in levels)
    done = sum(measured.completed for _, _, measured in levels)
    failed = sum(measured.failed for _, _, measured in levels)
    lengths = f"{options.input_lengths} tokens in, {options.output_lengths or 'as asked'} out"
    unit = {"rps": "requests/s", "batch": "a batch", "concurrency": "at once"}[options.unit.value]
    return f"{options.target.value}: {rates} {unit}, {lengths}; {done} completed, {failed} failed"


def _done(run: RunResult) -> list[Record]:
    return [record for record in run.records if record.status == OK]


def _spreads(panels: Sequence[Axes], run: RunResult) -> None:
    """Plot the cumulative distribution of each latency, on an axis of its own."""
    done = _done(run)
    samples: dict[str, Sequence[float | None]] = {
        "ttft": [record.ttft for record in done],
        "itl": [gap for record in done for gap in record.gaps()],
        "tpot": [record.tpot for record in done],
        "e2el": [record.latency for record in done],
    }
    for axes, (name, (label, colour)) in zip(panels, _LATENCIES.items(), strict=True):
        known = [value * 1000 for value in samples[name] if value is not None]
        axes.set_title(label)
        _finish(axes)
        axes.set_ylim(0, 102)
        axes.set_xlabel("milliseconds")
        if axes is panels[0]:
            axes.set_ylabel("share that took no longer, %")
        if not known:
            axes.annotate("not known", (0.5, 0.5), xycoords="axes fraction", ha="center")
            continue
        _curve(axes, known, label, colour)
        enough = len(known) >= _LEAST
        low, middle, high, rare = np.percentile(known, (0, 50, 99 if enough else 100, 99.5))
        # A few outliers would leave the rest a vertical line.
        left = 0 if low < rare / 2 or low == rare else low - (rare - low) * 0.1
        axes.set_xlim(left, (rare + (rare - left) * 0.08) or 1)
        for value in (middle, high):
            axes.axvline(value, color=_GREY, linewidth=0.8, linestyle=":")
        shown = f"{'p99' if enough else 'max'} {_shown(high)} ms, n={len(known)}"
        axes.set_title(f"{label}\np50 {_shown(middle)}, {shown}")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread_by_level(axes: Axes, levels: Sequence[Level]) -> None:
    for (options, run, _), colour in zip(levels, _shades(len(levels)), strict=True):
        values = [record.ttft for record in _done(run)]
        known = [value * 1000 for value in values if value is not None]
        _curve(axes, known, f"{options.rate:g}", colour)
    axes.set_title("TTFT, by concurrency")
    _share_axes(axes)


def _share_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    _readable(axes.xaxis)
    axes.set_xlabel("milliseconds, logarithmic")
    axes.set_ylabel("share that took no longer, %")
    axes.set_ylim(0, 102)
    for share in (50, 99):
        axes.axhline(share, color=_GREY, linewidth=0.6, linestyle=":")
        axes.annotate(
            f"p{share}",
            (0.01, share),
            xycoords=("axes fraction", "data"),
            color=_GREY,
            va="top",
        )
    _finish(axes)


def _curve(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    """Plot a cumulative distribution of milliseconds."""
    if values:
        ordered = np.sort(np.array(values))
        share = np.arange(1, ordered.size + 1) / ordered.size * 100
        places = np.unique(np.linspace(0, ordered.size - 1, 2000).astype(int))
        x, y = ordered[places], share[places]
        axes.step(x, y, where="post", label=label, color=colour, linewidth=1.8)


def _over_time(axes: Axes, levels: Sequence[Level]) -> None:
    several = len(levels) > 1
    highest = 0.0
    for (options, run, _), shade in zip(levels, _shades(len(levels)), strict=True):
        points = [(r.scheduled - run.started, r.ttft * 1000) for r in _done(run) if r.ttft]
        if points:
            thinned = points[:: max(1, len(points) // _DOTS)]
            x, y = zip(*thinned, strict=True)
            axes.scatter(
                x,
                y,
                s=9,
                alpha=0.6,
                linewidths=0,
                color=shade if several else _BLUE,
                label=f"{options.rate:g}" if several else "TTFT",
            )
            highest = max(highest, *y)
    failures = [
        record.scheduled - run.started
        for _, run, _ in levels
        for record in run.records
        if record.status == FAILED
    ]
    if failures:
        axes.plot(failures, [0] * len(failures), "x", color=_RED, label="failed", clip_on=False)
    axes.set_title("TTFT over time" + (", by concurrency" if several else ""))
    axes.set_xlabel("seconds from the start of the run, when due")
    axes.set_ylabel("TTFT, ms")
    axes.set_ylim(0, highest * 1.08 or 1)
    _finish(axes)


def _throughput(axes: Axes, levels: Sequence[Level]) -> None:
    x = [options.rate for options, _, _ in levels]
    tokens = [measured.rates.get("output_tokens") for _, _, measured in levels]
    if all(value is not None for value in tokens):
        y, unit = tokens, "output tokens/s"
    else:
        y, unit = [measured.rates["requests"] for _, _, measured in levels], "requests/s"
    axes.plot(x, [float(value or 0) for value in y], "o-", color=_BLUE, linewidth=1.8)
    for place, value in zip(x, y, strict=True):
        axes.annotate(
            _shown(float(value or 0)),
            (place, float(value or 0)),
            xytext=(0, 7),
            ha="center",
            textcoords="offset points",
            fontsize=9,
        )
    axes.set_title("Throughput against concurrency")
    axes.set_ylabel(unit)
    axes.set_ylim(0, max(float(value or 0) for value in y) * 1.15 or 1)
    _concurrency_axis(axes, levels)


def _times(axes: Axes, levels: Sequence[Level], name: str) -> None:
    """Plot p50 of one latency against concurrency, and p99 of those with values enough."""
    x = [options.rate for options, _, _ in levels]
    label, colour = _LATENCIES[name]
    found = [measured.metrics.get(name) for _, _, measured in levels]
    for point, style, least in (("p50", "o-", 1), ("p99", "o--", _LEAST)):
        known = (item if item and item.count >= least else None for item in found)
        y = [np.nan if item is None else getattr(item, point) * 1000 for item in known]
        if not np.isnan(y).all():
            axes.plot(x, y, style, color=colour, label=point, markersize=4)
    axes.set_title(f"{label} against concurrency\np50, and p99 of {_LEAST} values or more")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    _concurrency_axis(axes, levels)


def _concurrency_axis(axes: Axes, levels: Sequence[Level]) -> None:
    counts = {options.rate: measured.completed for options, _, measured in levels}
    axes.set_xscale("log", base=2)
    axes.set_xticks([*counts], [f"{rate:g}\nn={count}" for rate, count in counts.items()])
    axes.minorticks_off()
    axes.set_xlabel("requests at once, and how many were completed")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(frameon=False, fontsize=9)


def _shades(count: int) -> list[str]:
    """Colours from light to dark, one for each level of a sweep."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis_r"](place)) for place in np.linspace(0.15, 0.95, count)]


def _readable(axis: Axis) -> None:
    """Label a logarithmic axis in plain numbers: 1, 2, 5, 10, or powers of 10 on a long one."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if high / low < 2000 else (1,)))
    axis.set_major_formatter(_milliseconds)
    axis.set_minor_formatter(NullFormatter())


def _milliseconds(value: float, _: float) -> str:
    return f"{value:g}"
