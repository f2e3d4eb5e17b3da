"""Metrics of a run and summary statistics, against values worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from bench_runs import START, record, run

from cog_triton.bench.request_record import CUT, FAILED
from cog_triton.bench.run_metrics import compute_metrics, summarize


def test_summary_of_a_sample() -> None:
    found = summarize([4.0, None, 1.0, 3.0, 2.0, 5.0])
    assert found is not None
    values = dataclasses.asdict(found)
    assert values.pop("std") == pytest.approx(2**0.5)
    assert values == pytest.approx(
        {"count": 5, "mean": 3, "min": 1, "p50": 3, "p90": 4.6, "p95": 4.8, "p99": 4.96, "max": 5}
    )
    assert summarize([None]) is None


def test_latencies_of_a_request() -> None:
    one = record(0, 1.0, 1.5, 1.7, 2.1)
    assert one.ttft == pytest.approx(0.5)
    assert one.ttft_sent == pytest.approx(0.4)
    assert one.latency == pytest.approx(1.1)
    assert one.service == pytest.approx(1.0)
    assert one.tpot == pytest.approx(0.6 / 2)
    assert one.single_stream_tps == pytest.approx(3.0)
    assert one.gaps() == pytest.approx([0.2, 0.4])


def test_pieces_of_one_read_have_no_gap() -> None:
    one = record(0, 0.0)
    one.output(1.0, 2)
    one.output(3.0, 3)
    assert one.gaps() == [0.0, 2.0, 0.0, 0.0]
    assert one.pieces == 5


def test_an_answer_of_one_read_has_no_tpot() -> None:
    one = record(0, 0.0, output_tokens=5)
    one.output(1000.1, 5)
    assert one.ttft == pytest.approx(0.1)
    assert one.tpot is None


def test_an_answer_that_came_whole_has_no_ttft() -> None:
    one = record(0, 0.0, output_tokens=5)
    assert (one.ttft, one.tpot, one.gaps()) == (None, None, [])
    assert one.single_stream_tps == pytest.approx(50)


def test_all_metrics_of_a_run() -> None:
    records = [
        record(0, 0.0, 0.5, 1.0, 1.5),
        record(1, 1.0, 2.0, 2.2, 2.4),
        record(2, 2.0, status=FAILED, code="E2107", error="E2107 Overloaded: full"),
        record(3, 3.0, status=FAILED, code="HTTP 409", error="busy"),
    ]
    found = compute_metrics(run(*records, ended=1004.0))
    assert (found.completed, found.failed, found.cut) == (2, 2, 0)
    assert found.failures == {"E2107": 1, "HTTP 409": 1}
    assert found.examples["HTTP 409"] == "busy"
    assert found.metrics["ttft"].mean == pytest.approx(0.75)
    assert found.metrics["ttft_from_sending"].mean == pytest.approx(0.65)
    assert found.metrics["e2el"].max == pytest.approx(1.5)
    assert found.metrics["tpot"].mean == pytest.approx((0.5 + 0.2) / 2)
    assert found.metrics["tps_per_user"].mean == pytest.approx((2 + 5) / 2)
    assert found.metrics["itl"].count == 4
    assert found.rates == pytest.approx(
        {
            "requests": 2 / 4,
            "output_tokens": 6 / 4,
            "total_tokens": 26 / 4,
        }
    )


def test_what_the_server_reports_is_summarized() -> None:
    told = {"predict_time": 0.8, "time_to_first_token": 0.3}
    records = [record(0, 0.0, 0.5, 1.0, server=told), record(1, 0.0, 0.5, server={})]
    found = compute_metrics(run(*records))
    assert found.metrics["server_latency"].mean == 0.8
    assert found.metrics["server_ttft"].count == 1
    assert found.metrics.keys().isdisjoint({"queue_time", "server_tps"})


def test_concurrency_is_the_time_in_flight_over_the_run() -> None:
    # In flight from 0.1 to 1 and from 0.6 to 2, of 4 seconds.
    found = compute_metrics(run(record(0, 0.0, 1.0), record(1, 0.5, 2.0), ended=1004.0))
    assert found.concurrency == pytest.approx((0.9 + 1.4) / 4)


def test_cut_requests_neither_failed_nor_succeeded() -> None:
    records = [
        record(0, 0.0, 1.0),
        record(1, 0.5, status=CUT),
        record(2, 0.6, sent=0.0, status=CUT),
    ]
    found = compute_metrics(run(*records, interrupted=True))
    assert (found.completed, found.failed, found.cut) == (1, 0, 2)


@pytest.mark.parametrize(
    ("state", "sent", "says"),
    [
        ({"cpu": 9.5}, 0.001, "it used 95% of a core;"),
        ({"lag": 0.02}, 0.001, "its event loop ran 20 ms late (p99), for others had"),
        ({"lag": 0.02, "cpu": 5.0}, 0.001, "its event loop ran 20 ms late (p99);"),
        ({}, 0.012, "it sent requests 12 ms after they were due (p99), for others had"),
        ({}, 0.009, ""),
    ],
)
def test_a_bottleneck_in_the_generator_is_a_warning(
    state: dict[str, float], sent: float, says: str
) -> None:
    found = compute_metrics(run(record(0, 0.0, 1.0, sent=START + sent), **state))
    assert says in found.warning
    assert bool(found.warning) == bool(says)


def test_short_answers_and_unknown_counts_are_noted() -> None:
    records = [
        record(0, 0.0, 1.0, wanted_tokens=5),
        record(1, 0.0, 1.0, output_tokens=None),
    ]
    notes = compute_metrics(run(*records)).notes
    assert "1 of 2 answers have fewer tokens than were asked for" in notes
    assert any("does not tell all token counts" in note for note in notes)
