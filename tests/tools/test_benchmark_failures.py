"""Benchmarks with failing predictions: counted where a report has room for them, else fatal."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable

import pytest
from _load import Wave, wave
from _load_cost import LoadCost
from _report import Report
from _streams import Stream
from against_original import KINDS, ORIGINAL, OURS, Kind, tell
from scripted_server import RESET, Part, Request, ScriptedServer

from cog_triton.bench.load_generator import GeneratorUsage

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer(body: bytes) -> list[Part]:
    return [HEAD, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)]


def completed(status: str = "succeeded", tokens: int = 3, error: str = "") -> list[Part]:
    metrics = {"output_token_count": tokens}
    told = json.dumps({"status": status, "metrics": metrics, "error": error})
    outputs = b"event: output\ndata: {}\n\n" * tokens
    return answer(outputs + f"event: completed\ndata: {told}\n\n".encode())


def every_third(bad: list[Part]) -> Callable[[Request], list[Part]]:
    """Answers well twice, and each third time with `bad`."""
    seen: list[Request] = []

    def choose(request: Request) -> list[Part]:
        seen.append(request)
        return completed() if len(seen) % 3 else bad

    return choose


FAILED = "E2105 TritonUnavailable: the output ended early"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (completed("failed", error=FAILED), f"HTTP 200: '{FAILED}'"),
        (completed(tokens=2), "a prediction brought 2 tokens of 3"),
        (answer(b"event: output\n"), "HTTP 200: None"),
        ([HEAD, RESET], "before the answer's end"),
        ([RESET], "before the answer's end"),
        ([b"HTTP/1.1 409 Conflict\r\nContent-Length: 4\r\n\r\nbusy"], "HTTP 409: b'busy'"),
        ([b"nonsense\r\n\r\n"], "not HTTP"),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_failed_predictions_are_counted_and_the_others_measured(
    bad: list[Part], said: str, plain: bool
) -> None:
    with ScriptedServer(every_third(bad)) as server:
        found = wave(server.url, {}, 3, 0.3, plain=plain, lenient=True, tokens=3)
        assert len(found.streams) + len(found.failures) == len(server.requests)
        assert found.streams
        assert found.failures
        assert all(said in failure for failure in found.failures), found.failures
        assert found.tokens == 3 * len(found.streams)
    with (
        ScriptedServer(every_third(bad)) as server,
        pytest.raises(RuntimeError, match=r"."),
    ):
        wave(server.url, {}, 3, 0.3, plain=plain, tokens=3)


def test_a_refused_connection_is_a_failure() -> None:
    with ScriptedServer([]) as server:
        url = server.url
    found = wave(url, {}, 2, 0, lenient=True)
    assert (found.streams, len(found.failures), found.tokens) == ([], 2, 0)
    assert found.client_us == float("inf")
    with pytest.raises(RuntimeError):
        wave(url, {}, 2, 0)


def cell(rate: int, failures: int = 0, cpu: float = 0.1) -> LoadCost:
    """One second in which `rate` tokens came, of one prediction if any."""
    stream = Stream(ended=1.0, told={"output_token_count": rate})
    stream.times, stream.counts = array("d", [0.5]), array("l", [rate])
    load = GeneratorUsage(cpu=0.1, wall=1.0, lags=array("d"))
    failed = ["a prediction failed: illegal status line"] * failures
    return LoadCost(Wave([stream] if rate else [], 1.0, load, failed), {"cog": cpu})


def told(ours: list[LoadCost], theirs: list[LoadCost], kind: Kind = KINDS[0]) -> Report:
    report = Report("against_original", "")
    tell({(OURS, (64, 128)): ours, (ORIGINAL, (64, 128)): theirs}, kind, report)
    return report


def values(report: Report) -> list[tuple[float, str]]:
    return [(figure.value, figure.verdict) for figure in report.figures]


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_reported_beside_figures(kind: Kind) -> None:
    report = told([cell(1000, 1), cell(2000)], [cell(400, 3), cell(400)], kind)
    ours, theirs = report.grids[0].rows
    assert (ours[1:4], theirs[1:4]) == (
        [OURS, "2000", "1 of 3"],
        [ORIGINAL, "400", "3 of 5"],
    )
    assert values(report) == [
        (pytest.approx(50), "met"),
        (pytest.approx(5), "met"),
        (pytest.approx(5), ""),
    ]
    assert all(kind.name in figure.name for figure in report.figures)
    assert report.notes[:2] == [
        f"{name}, 64 x 128, {kind.name}: {count} failed, such as: a prediction failed: illegal"
        " status line"
        for name, count in ((OURS, 1), (ORIGINAL, 3))
    ]


def test_rounds_with_failures_count_if_there_are_no_others() -> None:
    report = told([cell(1000), cell(2000, 1)], [cell(100, 1), cell(1000)])
    assert [row[2] for row in report.grids[0].rows] == ["1000", "1000"]
    assert values(report)[:2] == [(pytest.approx(100), "missed"), (pytest.approx(6), "met")]


def test_a_report_without_failures_does_not_mention_them() -> None:
    report = told([cell(1000)], [cell(200)])
    assert [row[3] for row in report.grids[0].rows] == ["0", "0"]
    assert report.notes == []


def test_a_side_whose_predictions_all_failed_has_no_ratio() -> None:
    report = told([cell(1000)], [cell(0, 5)])
    assert report.grids[0].rows[1][1:5] == [ORIGINAL, "all failed", "5 of 5", "-"]
    assert len({len(row) for row in report.grids[0].rows} | {len(report.grids[0].columns)}) == 1
    assert values(report) == [(pytest.approx(100), "missed")]


def test_no_target_is_met_if_all_of_our_predictions_failed() -> None:
    report = told([cell(0, 5)], [cell(100)])
    assert report.grids[0].rows[0][2] == "all failed"
    assert [verdict for _, verdict in values(report)] == ["missed", "missed", ""]
    assert report.figures[1].value == 0


def test_rounds_without_a_result_of_the_other_side_are_not_in_the_ratio() -> None:
    report = told([cell(1000), cell(900)], [cell(0, 5), cell(300)])
    assert report.figures[1].value == pytest.approx(3)
