"""Report, JSON, CSV, comparison and plots of ``cog-triton bench``.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/unit/test_bench_report.py, and read the
diff of tests/unit/golden/bench.
"""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from bench_runs import options, record, run

from cog_triton.bench import plot, report
from cog_triton.bench.load_generator import RunResult
from cog_triton.bench.options import Options, OutputMethod, Unit, parse_lengths
from cog_triton.bench.request_record import CUT, FAILED
from cog_triton.bench.run_metrics import compute_metrics
from cog_triton.errors import InvalidArgument, MissingExtra

GOLDEN = Path(__file__).parent / "golden" / "bench"
TOLD = {"predict_time": 0.9, "tokens_per_second": 3.5, "time_to_first_token": 0.25}


def originals_run() -> tuple[Options, RunResult]:
    """As the sample report of the original cog-triton's README, in small."""
    own = options(
        unit=Unit.BATCH,
        rate=2.0,
        duration=10.0,
        requests=None,
        tps=4.0,
        output_method=OutputMethod.YIELD,
        output_lengths=parse_lengths("n", "3"),
    )
    return own, run(
        *(
            record(0, 0.0, 0.5, 0.75, 1.0, server=TOLD),
            record(1, 0.0, 0.6, 0.8, 1.1, server=TOLD),
            record(2, 2.1, 2.5, 2.75, 3.1, server=TOLD),
            record(3, 2.1, status=FAILED, code="HTTP 409", error='{"detail": "Already running"}'),
        ),
        notes=["A note of the target"],
    )


def open_run() -> tuple[Options, RunResult]:
    own = options(rate=8.0, duration=30.0, requests=100, slo={"ttft": 450.0, "e2el": 900.0})
    return own, run(
        record(0, 0.0, 0.5, 1.0),
        record(1, 0.5, 0.7, 1.2, output_tokens=None),
        record(2, 1.0, status=CUT),
        cpu=9.9,
        interrupted=True,
    )


def nothing() -> tuple[Options, RunResult]:
    own = options(requests=1, output_lengths=None)
    return own, run(record(0, 0.0, status=FAILED, code="timeout", error="no answer"))


CASES = {"original": originals_run, "interrupted": open_run, "nothing": nothing}


@pytest.mark.parametrize("case", [*CASES, "verbose"])
def test_the_report_is_word_for_word_as_recorded(case: str) -> None:
    own, done = CASES.get(case, originals_run)()
    told = {"cog_triton_queue_time_seconds": 0.0012, "cog_triton_generation_tokens_total": 9.0}
    found = compute_metrics(own, done, told if case == "interrupted" else {})
    prompts = "10 (words; --tokenizer makes exact tokens)"
    text = report.text(own, found, prompts, verbose=case == "verbose")
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_the_report_begins_with_its_one_table() -> None:
    own, done = open_run()
    lines = report.text(own, compute_metrics(own, done, {}), "10").splitlines()
    assert lines[0].split() == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert lines[1].startswith("TTFT, ms")
    assert max(map(len, lines[:10])) <= 82
    assert not any("Expected" in line for line in lines)


def test_the_report_has_the_sections_of_the_original_in_order() -> None:
    own, done = originals_run()
    text = report.text(own, compute_metrics(own, done, {}), "10", verbose=True)
    names = [
        "Test Configuration:",
        "Output Method: yield",
        "Mode: batch",
        "Rate: 2.0 batch",
        "Duration: 10 seconds",
        "Output tokens: 3",
        "Concurrency levels:",
        "Mode concurrency: ",
        "Mean concurrency: ",
        "Median concurrency: ",
        "Max concurrency: ",
        "Min concurrency: ",
        "Statistics for completed predictions:",
        "Single-stream TPS:",
        *(f"SSTPS - {name}: " for name in ("Std", "Median", "Mean", "Max", "Min")),
        "Latency - Std: ",
        *(f"{name} response latency: " for name in ("Median", "Mean", "Max", "Min")),
        "Server-side metrics:",
        "Server-side TPS",
        "--Expected mean: 4.000, Actual mean: 3.500",
        "Response Latency",
        "--Expected mean: 0.750, Actual mean: 0.900",
        "Time to First Token",
        "--Expected mean: 0.250, Actual mean: 0.250",
        "Total requests made: 4",
        "Total requests started: 4",
        "Total requests completed: 3",
        "Failure rate: 0.250, Total failures: 1",
        "Cog already running prediction: 1",
        "E2E throughput: ",
    ]
    lines = iter(text.splitlines())
    for name in names:
        assert any(line.startswith(name) for line in lines), name


def test_json_has_every_metric() -> None:
    own, done = originals_run()
    found = json.loads(report.as_json(own, [(own, compute_metrics(own, done, {}))]))
    assert found["schema"] == 1
    assert found["options"]["unit"] == "batch"
    assert found["options"]["api_key"] is None
    (only,) = found["runs"]
    assert (only["rate"], only["completed"], only["failed"]) == (2.0, 3, 1)
    assert only["metrics"]["ttft"]["p50"] == pytest.approx(0.5)
    assert only["server"]["tps"]["expected"]["mean"] == 4
    assert only["failures"] == {"HTTP 409": 1}


def test_csv_has_a_line_for_each_request() -> None:
    own, done = open_run()
    never = record(9, 2.0, sent=0.0, ended=0.0, status=CUT)
    done.records.append(never)
    rows = list(csv.DictReader(io.StringIO(report.as_csv([(own, done)]))))
    assert [row["index"] for row in rows] == ["0", "1", "2", "9"]
    assert rows[0]["ttft_s"] == "0.500000"
    assert rows[0]["e2el_from_sending_s"] == "0.900000"
    assert rows[0]["pieces"] == "2"
    assert rows[1]["output_tokens"] == ""
    assert (rows[3]["scheduled_s"], rows[3]["sent_s"], rows[3]["e2el_s"]) == ("2.000000", "", "")


def test_output_files_are_checked_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="its directory does not exist"):
        report.require_writable("--csv", tmp_path / "none" / "x.csv")
    with pytest.raises(InvalidArgument, match=r"--json=.*cannot be written"):
        report.write("--json", tmp_path, "x")


def test_plots_of_runs_and_sweeps_are_png() -> None:
    pytest.importorskip("matplotlib")
    own, done = originals_run()
    one = plot.png([(own, done, compute_metrics(own, done, {}))], "a model")
    levels = []
    for rate in (1.0, 2.0, 4.0):
        own = options(unit=Unit.CONCURRENCY, rate=rate)
        levels.append((own, done, compute_metrics(own, done, {})))
    empty, failed = nothing()
    for picture in (
        one,
        plot.png(levels, "a model"),
        plot.png([(empty, failed, compute_metrics(empty, failed, {}))], "a model"),
    ):
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000


def drawn(levels: list[plot.Level], patch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The figure that `plot.png` saves, and its panels."""
    figure_module = pytest.importorskip("matplotlib.figure")
    saved = []
    save = figure_module.Figure.savefig

    def saving(figure: Any, *arguments: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **options)

    patch.setattr(figure_module.Figure, "savefig", saving)
    plot.png(levels, "llama, 8 x NVIDIA H200, 2026-11-26 11:02")
    (figure,) = saved
    return figure, figure.axes


@pytest.mark.parametrize(("count", "points"), [(99, {"p50"}), (100, {"p50", "p99"})])
def test_a_sweeps_plot_tells_its_subject_and_no_p99_of_few(
    count: int, points: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[plot.Level] = []
    for rate, apart in ((1.0, 1.98), (2.0, 2.25)):
        own = options(unit=Unit.CONCURRENCY, rate=rate)
        done = run(
            *(record(place, place * 5 / apart, place * 5 / apart + 1.0) for place in range(count))
        )
        levels.append((own, done, compute_metrics(own, done, {})))
    figure, (throughput, ttft, *_) = drawn(levels, monkeypatch)
    assert figure.get_suptitle().startswith("llama, 8 x NVIDIA H200, 2026-11-26 11:02\n")
    assert {line.get_label() for line in ttft.lines} == points
    ticks = [label.get_text() for label in ttft.get_xticklabels()]
    assert ticks == [f"1\nn={count}", f"2\nn={count}"]
    labels = [text.get_text() for text in throughput.texts]
    assert len(set(labels)) == 2
    assert all("." in label for label in labels)


@pytest.mark.parametrize(("count", "point"), [(99, "max"), (100, "p99")])
def test_a_runs_plot_tells_no_p99_of_few(
    count: int, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(*(record(place, place, place + 1.0) for place in range(count)))
    _, (ttft, *_) = drawn([(options(), done, compute_metrics(options(), done, {}))], monkeypatch)
    assert ttft.get_title().endswith(f"p50 1,000, {point} 1,000 ms, n={count}")


def test_a_plot_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"E1401 .*pip install 'cog-triton\[bench\]'"):
        plot.require()
