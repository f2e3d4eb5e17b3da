"""Report and JSON of ``cog-triton bench``.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/unit/test_bench_report.py, and read the
diff of tests/unit/golden/bench.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bench_runs import options, record, run

from cog_triton.bench import report
from cog_triton.bench.load_generator import RunResult
from cog_triton.bench.options import Lengths, Options, OutputMethod, Unit
from cog_triton.bench.request_record import CUT, FAILED
from cog_triton.bench.run_metrics import compute_metrics
from cog_triton.errors import InvalidArgument

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
        output_lengths=Lengths.parse("n", "3"),
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
    own = options(rate=8.0, duration=30.0, requests=100)
    return own, run(
        record(0, 0.0, 0.5, 1.0),
        record(1, 0.5, 0.7, 1.2, output_tokens=None),
        record(2, 1.0, status=CUT),
        cpu=9.9,
        interrupted=True,
    )


def nothing() -> tuple[Options, RunResult]:
    own = options(requests=1)
    return own, run(record(0, 0.0, status=FAILED, code="timeout", error="no answer"))


CASES = {"original": originals_run, "interrupted": open_run, "nothing": nothing}


@pytest.mark.parametrize("case", CASES)
def test_the_report_is_word_for_word_as_recorded(case: str) -> None:
    own, done = CASES[case]()
    text = report.text(own, compute_metrics(done))
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_the_report_begins_with_its_one_table() -> None:
    own, done = open_run()
    lines = report.text(own, compute_metrics(done)).splitlines()
    assert lines[0].split() == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert lines[1].startswith("TTFT, ms")
    assert max(map(len, lines[:10])) <= 82


def test_json_has_every_metric() -> None:
    own, done = originals_run()
    found = json.loads(report.as_json(own, compute_metrics(done)))
    assert found["schema"] == 2
    assert found["options"]["unit"] == "batch"
    assert found["options"]["api_key"] is None
    (only,) = found["runs"]
    assert (only["rate"], only["completed"], only["failed"]) == (2.0, 3, 1)
    assert only["metrics"]["ttft"]["p50"] == pytest.approx(0.5)
    assert only["metrics"]["server_tps"]["mean"] == 3.5
    assert only["failures"] == {"HTTP 409": 1}


def test_the_json_file_is_checked_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--json=.*its directory does not exist"):
        report.require_writable(tmp_path / "none" / "x.json")
    with pytest.raises(InvalidArgument, match=r"--json=.*cannot be written"):
        report.write(tmp_path, "x")
