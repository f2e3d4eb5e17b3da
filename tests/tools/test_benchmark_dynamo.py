"""Benchmark beside NVIDIA Dynamo: chat streams, its environment, model directory and tables."""

import json
from array import array
from pathlib import Path

import _dynamo
import pytest
from _load import Wave, wave
from _load_cost import LoadCost
from _report import Report
from _streams import CHAT, ChatStream
from against_dynamo import OURS, THEIRS, Load, tell
from scripted_server import ScriptedServer, event, stream, whole

from cog_triton.bench.load_generator import GeneratorUsage

USAGE = {"prompt_tokens": 25, "completion_tokens": 3, "details": {"cached_tokens": 0}}


def chunk(delta: dict[str, str]) -> bytes:
    return event(choices=[{"index": 0, "delta": delta}], usage=None).replace(b": ", b":")


CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "The", "role": "assistant"}),
    chunk({"content": ' "delta":{"content":"'}),
    chunk({"content": " sea"}),
    chunk({}),
    event(choices=[], usage=USAGE).replace(b": ", b":"),
]
ANSWER = [*CHUNKS, b"data: [DONE]\n\n"]


@pytest.mark.parametrize("size", range(1, 60))
def test_pieces_of_text_count_once_however_reads_split_them(size: int) -> None:
    said = b"".join(ANSWER)
    found = ChatStream(sent=0.0)
    found.begin(200, {})
    for at in range(0, len(said), size):
        found.body(said[at : at + size], 1.0 + at)
    found.finish()
    assert sum(found.counts) == found.tokens == 3
    assert found.times[0] > len(CHUNKS[0]) - size  # a role is no token


def test_a_chat_completion_is_asked_for_as_many_tokens_as_a_prediction() -> None:
    with ScriptedServer(stream(*ANSWER)) as server:
        found = wave(server.url, {"prompt": "Hi", "max_tokens": 3}, 2, tokens=3, api=CHAT)
        assert found.tokens == 6
        asked = server.request().json
    assert server.request().path == "/v1/chat/completions"
    assert asked["messages"] == [{"role": "user", "content": "Hi"}]
    assert asked["max_tokens"] == 3
    assert asked["stream"]
    assert asked["ignore_eos"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (stream(*CHUNKS), "a completion failed: HTTP 200"),  # no [DONE]
        (stream(CHUNKS[1], event(error={"message": "E2105"}), b"data: [DONE]\n\n"), "HTTP 200"),
        ([whole(b'{"error": "busy"}', "529 Overloaded")], "HTTP 529: .*busy"),
    ],
)
def test_an_answer_that_does_not_end_well_has_failed(answer: list[bytes], said: str) -> None:
    with ScriptedServer(answer) as server, pytest.raises(RuntimeError, match=said):
        wave(server.url, {"max_tokens": 3}, 1, api=CHAT)


def test_the_lock_has_the_version_that_docs_name() -> None:
    root = Path(_dynamo.__file__).parents[1]
    (version,) = [
        line.split("==")[1].rstrip(" \\")
        for line in (root / "requirements" / "tools.lock").read_text().splitlines()
        if line.startswith("ai-dynamo==")
    ]
    assert f"Dynamo {version}" in (root / "docs" / "performance.md").read_text()


def test_the_mocker_gets_our_tokenizer_and_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    model = _dynamo.make_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == json.loads((model / "mock.json").read_text())["vocab_size"]
    assert (model / "tokenizer.json").is_file()
    variables = _dynamo.environment(tmp_path)
    hosts = {value for name, value in variables.items() if name.endswith("_HOST")}
    assert hosts == {"127.0.0.1"}
    assert variables["DYN_DISCOVERY_BACKEND"] == "file"


def cell(cpu: dict[str, float], tokens: int = 1000) -> LoadCost:
    """Two reads, 10 ms apart, with the events of all tokens but one."""
    one = ChatStream(sent=0.0, ended=1.0, told={"output_token_count": tokens})
    one.times, one.counts = array("d", [0.5, 0.51]), array("l", [1, tokens - 2])
    return LoadCost(Wave([one], 1.0, GeneratorUsage(cpu=0.1, wall=1.0, lags=array("d"))), cpu)


def told(sides: dict[str, list[LoadCost]], load: Load = (64, 100)) -> Report:
    report = Report("against_dynamo", "")
    tell({load: sides}, report)
    return report


OUR_CPU = {"server": 0.01, "cog": 0.01, "worker": 0.04, "tritonserver": 0.02, "stub a": 0.02}
THEIR_CPU = {"dynamo.frontend": 0.02, "dynamo.mocker": 0.02, "others": 0.01}


def test_the_front_end_is_told_apart_on_either_side() -> None:
    report = told({OURS: [cell(OUR_CPU)], THEIRS: [cell(THEIR_CPU)]})
    ours, theirs = report.grids[0].rows
    assert ours[:7] == ["64 x 100", OURS, "1000", "0", "100", "60", "40"]
    assert theirs[:7] == ["64 x 100", THEIRS, "1000", "0", "50", "20", "30"]
    assert ours[7] == "0.999"
    figures = {figure.name: figure.value for figure in report.figures}
    assert figures["CPU, 64 x 100"] == pytest.approx(100)
    assert figures["CPU, 64 x 100: ours / Dynamo's"] == pytest.approx(2)
    assert figures["CPU of the front end, 64 x 100: ours / Dynamo's"] == pytest.approx(3)
    assert figures["TTFT p50, 64 x 100: ours / Dynamo's"] == pytest.approx(1)


def test_ours_is_told_alone_where_there_is_no_dynamo() -> None:
    report = told({OURS: [cell(OUR_CPU)]}, (32, 0))
    assert [row[:2] for row in report.grids[0].rows] == [["32, flat out", OURS]]
    assert [figure.name for figure in report.figures] == ["CPU, 32, flat out"]
