"""Benchmarks at a set rate: loads and their targets, and clients that disturb others."""

import argparse
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import _disturbances
import _servers
import fixed_rate
import pytest
from _disturbances import disturbed
from _load import Wave
from _load_cost import LoadCost
from _report import Report
from _servers import FREE_CLOCKS, STEP_CLOCK, Server
from _streams import CHAT, PREDICTIONS, Api, Stream
from disturbed import KINDS, UNDISTURBED, tell
from scripted_server import ScriptedServer, stream, whole

from cog_triton.bench.load_generator import GeneratorUsage


def cell(gap: float = 0.01, tokens: int = 11) -> LoadCost:
    """A stream of tokens that are `gap` seconds apart, and 1 ms of CPU for each."""
    one = Stream(sent=0.0, ended=gap * tokens, told={"output_token_count": tokens})
    one.times = array("d", [gap * (1 + at) for at in range(tokens)])
    one.counts = array("l", [1] * tokens)
    load = GeneratorUsage(cpu=0.1, wall=1.0, lags=array("d"))
    return LoadCost(Wave([one], 1.0, load), {"cog": tokens / 1000})


def verdicts(load: fixed_rate.Load, clock: str, gap: float) -> dict[str, str]:
    made = fixed_rate.figures(load, cell(gap), clock)
    return {figure.name.partition(": ")[2]: figure.verdict for figure in made}


def test_loads_with_cpu_targets_run_with_free_clocks_beside_a_step_clock() -> None:
    free = fixed_rate.loads(FREE_CLOCKS)
    both = fixed_rate.loads(STEP_CLOCK)
    assert {load.clock for load in free} == {FREE_CLOCKS}
    assert [load.named(STEP_CLOCK) for load in both[len(free) :]] == [
        "64 x 100, free clocks",
        "64 x 100, /v1, free clocks",
    ]
    assert len({load.named(STEP_CLOCK) for load in both}) == len(both)


def test_even_and_cheap_streams_are_judged() -> None:
    even = fixed_rate.Load(40, 256, CHAT, clock=STEP_CLOCK)
    assert verdicts(even, STEP_CLOCK, 0.026) == {
        "mean rate of a stream": "",
        "p50 ITL / made": "met",
        "p99 ITL / made": "met",
        "median TTFT beyond what is made": "",
    }
    assert verdicts(even, STEP_CLOCK, 0.06)["p99 ITL / made"] == "missed"
    dense = fixed_rate.Load(100, 64, PREDICTIONS, clock=STEP_CLOCK)
    assert verdicts(dense, STEP_CLOCK, 0.01)["CPU of all server processes"] == "missed"
    assert verdicts(dense, STEP_CLOCK, 0.01)["mean rate of a stream"] == "met"
    free = fixed_rate.Load(100, 64, PREDICTIONS, clock=FREE_CLOCKS)
    assert set(verdicts(free, STEP_CLOCK, 0.01).values()) == {""}
    assert verdicts(free, FREE_CLOCKS, 0.01)["mean rate of a stream"] == "met"
    assert verdicts(free, FREE_CLOCKS, 0.01)["CPU of all server processes"] == ""


def test_a_clock_is_an_option_of_the_mock(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(_servers, "server", lambda *_, **given: asked.append(given["environment"]))
    _servers.mock_server(tps=40)
    _servers.mock_server(tps=40, clock=STEP_CLOCK)
    _servers.mock_server(clock=STEP_CLOCK)
    assert asked == [None, {"MOCK_STEP_MS": "25"}, None]
    parser = argparse.ArgumentParser()
    _servers.add_clock(parser)
    assert parser.parse_args(["--clock", FREE_CLOCKS]).clock == FREE_CLOCKS


def test_a_disturbance_is_told_over_the_same_round_without_it() -> None:
    report = Report("disturbed", "")
    kinds = {UNDISTURBED: [cell(0.01), cell(0.02)], "noise": [cell(0.02), cell(0.06)]}
    tell({"/v1": kinds}, report)
    (figure,) = report.figures
    assert figure.name == "ITL p99, /v1, noise / undisturbed"
    assert figure.value == pytest.approx(2.5)
    assert figure.verdict == "missed"


def test_streams_that_failed_were_disturbed() -> None:
    report = Report("disturbed", "")
    failed = LoadCost(replace(cell(0.01).wave, failures=["E2105"]), {})
    tell({"/v1": {UNDISTURBED: [cell(0.01)], "noise": [failed]}}, report)
    assert report.figures[0].verdict == "missed"
    assert report.notes[0] == "/v1, noise: E2105"


def at(url: str) -> Server:
    return Server(0, Path(), url, url, url, url, 0, 0)


@pytest.mark.parametrize(
    ("kind", "api", "path", "holds"),
    [
        ("long_prompts", CHAT, "/v1/chat/completions", b" the the"),
        ("long_prompts", PREDICTIONS, "/predictions", b" the the"),
        ("direct_clients", CHAT, "/v2/models/tensorrt_llm/generate_stream", b"input_ids"),
        ("reads_nothing", PREDICTIONS, "/predictions", b'"max_tokens": 100000'),
    ],
)
def test_a_disturbance_goes_on_within_its_block(
    kind: str, api: Api, path: str, holds: bytes
) -> None:
    disturb = getattr(_disturbances, kind)
    with (
        ScriptedServer(stream(b"data: {}\n\n")) as server,
        disturbed(disturb, at(server.url), api),
    ):
        assert server.request().path == path
        assert holds in server.request().body


def test_a_disturbance_that_fails_is_no_disturbance() -> None:
    refusing = ScriptedServer([whole(b"{}", "503 Service Unavailable")])
    with (
        refusing as server,
        pytest.raises(RuntimeError, match="direct_clients: ended with 1"),
        disturbed(_disturbances.direct_clients, at(server.url), CHAT),
    ):
        pass


def test_every_kind_is_measured_beside_none() -> None:
    assert next(iter(KINDS)) == UNDISTURBED
    assert [kind for kind in KINDS.values() if kind is None] == [None]
