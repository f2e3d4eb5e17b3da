"""Scenarios of fault injection: strictly parsed, planned by seed, and held against their aims."""

from collections import Counter
from pathlib import Path

import pytest
from _report import write_between
from faults import kinds, report, scenario
from faults.answers import (
    CHAT,
    COMPLETE,
    COMPLETIONS,
    CUT,
    ENDED,
    MESSAGES,
    OTHER,
    PREDICTIONS,
    RESPONSES,
    TRITON,
    WRONG,
    Answer,
    Question,
)
from faults.kinds import KINDS
from faults.record import Header, Record, Records, RecordsError
from faults.scenario import Event, Scenario, ScenarioError, Setup

FIRST = {"report": "killed", "fault": "kill", "victims": ["engine"]}
EVENT = Event(number=0, engine="mock", scenario="kill", victim="engine", after=6, lasts=0)
HEADER = Header(seed=1, faults={"mock": 2}, only=(), commit="c1", machine="m", date="2026-01-01")


def test_all_scenarios_are_read_and_planned() -> None:
    scenarios = scenario.read_all()
    for engine in scenario.ENGINES:
        drawn = scenario.plan(scenarios, engine, 100, seed=3)
        assert drawn == scenario.plan(scenarios, engine, 100, seed=3)
        assert drawn != scenario.plan(scenarios, engine, 100, seed=4)
        fits = {name for name, one in scenarios.items() if engine in one.engines}
        assert {event.scenario for event in drawn} == fits
        for event in drawn:
            least, most = scenarios[event.scenario].events.lasts
            assert least <= event.lasts <= most
            assert event.victim in scenarios[event.scenario].victims


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("fault: kill\nvictims: [engine]", "report", "Field required"),
        ("report: a\nfault: burn\nvictims: [engine]", "fault", "fault must be one of kill, "),
        ("report: a\nfault: kill\nvictims: []", "victims", "at least 1 item"),
        ("report: a\nfault: kill\nvictims: [a]\nlaod: {}", "laod", "Extra inputs"),
        ("report: a\nfault: kill\nvictims: [a]\nload: {streams: 0}", "load.streams", "or equal"),
        ("report: a\nfault: kill\nvictims: [a]\nevents: {after: [3, 1]}", "events.after", "least"),
        ("report: a\nfault: kill\nvictims: [a]\nengines: [vllm]", "engines.0", "mock, openvino"),
        ("just text", "the file", "valid dictionary"),
    ],
)
def test_a_bad_scenario_is_refused_by_file_key_and_rule(
    tmp_path: Path, text: str, key: str, rule: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as failure:
        scenario.read(path)
    assert str(failure.value).startswith(f"{path}: {key}: ")
    assert rule in str(failure.value)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ScenarioError, match=r"--only=burn: must be of .*kill"):
        scenario.read_all(("burn",))


QUESTION = Question("Count.", 3, "one two three", {kinds.SAMPLED: "one two three"})
KIND = {kind.name: kind for kind in KINDS}


def fed(kind: str, *events: str, engine: str = "mock", question: Question = QUESTION) -> Answer:
    answer = Answer(KIND[kind], engine, question, 0.0)
    answer.begin(200, {})
    if answer.streamed:
        for at, event in enumerate(events):
            answer.body(f"data: {event}\n\n".encode(), float(at))
    else:
        answer.body("".join(events).encode(), 0.0)
    answer.end(9.0)
    return answer


def test_streams_are_compared_with_the_known_text() -> None:
    usage = '{"choices": [], "usage": {"completion_tokens": 3}}'
    pieces = ['{"choices": [{"text": "one two"}]}', '{"choices": [{"text": " three"}]}']
    assert fed("completions", *pieces, usage).outcome == COMPLETE
    assert fed("completions", pieces[0], usage).outcome == WRONG
    assert fed("completions", *reversed(pieces), usage).outcome == WRONG
    failed = fed("completions", pieces[0], '{"error": "E2105 TritonUnavailable: x"}')
    assert (failed.outcome, failed.reads) == ("E2105", [0.0])
    jumped = fed("predictions", '{"chunk": "one", "index": 1}')
    assert jumped.outcome == WRONG
    cut = Answer(KIND["completions"], "mock", QUESTION, 0.0)
    cut.end(1.0, "connection closed")
    assert cut.outcome == CUT


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        (
            "chat",
            ['{"choices": [{"delta": {"content": "one two three"}}], "usage": null}', "USAGE"],
        ),
        ("chat, whole", ['{"choices": [{"message": {"content": "one two three"}}], USAGE}']),
        (
            "responses",
            ['{"type": "response.output_text.delta", "delta": "one two three"}', "RESPONSE"],
        ),
        ("Triton's generate_stream", ['{"text_output": "one two"}', '{"text_output": " three"}']),
    ],
)
def test_text_is_read_of_every_api(kind: str, events: list[str]) -> None:
    usage = '"usage": {"completion_tokens": 3}'
    part = '{"type": "output_text", "text": "one two three"}'
    response = (
        '{"type": "response.completed", "response": {"error": null,'
        f' "usage": {{"output_tokens": 3}}, "output": [{{"content": [{part}]}}]}}}}'
    )
    told = [
        '{"choices": [], ' + usage + "}"
        if event == "USAGE"
        else event.replace("USAGE", usage).replace("RESPONSE", response)
        for event in events
    ]
    question = Question(
        "Count.", 3, "one two three", dict.fromkeys(kinds.FLAVOURS, "one two three")
    )
    assert fed(kind, *told, question=question).outcome == COMPLETE
    less = [event.replace(" three", " thr") for event in told]
    assert fed(kind, *less, question=question).outcome == WRONG


def test_a_promise_is_of_a_kind_and_an_engine() -> None:
    error = '{"error": "E2105 TritonUnavailable: x"}'
    assert fed("chat, JSON schema", error, engine="openvino").outcome == "E2105"
    assert fed("completions, penalties", error, engine="openvino").outcome == "E2105"
    assert fed("predictions", error, engine="openvino").outcome == "E2105"
    assert fed("Triton's generate_stream", error).outcome == ENDED
    sampled = ['{"chunk": "two", "index": 0}']
    sampled += ['{"status": "succeeded", "metrics": {"output_token_count": 3}, "output": ["two"]}']
    assert fed("predictions, seed", *sampled).outcome == WRONG
    assert fed("predictions, seed", *sampled, engine="openvino").outcome == WRONG
    known = Question("Count.", 3, "one two three", dict.fromkeys(kinds.FLAVOURS, "one two three"))
    as_drawn = {"engine": "openvino", "question": known}
    assert fed("predictions, repetition penalty", *sampled, **as_drawn).outcome == OTHER
    short = [sampled[0], sampled[1].replace("3}", "2}")]
    assert fed("predictions, repetition penalty", *short, **as_drawn).outcome == WRONG
    guided = ['{"choices": [{"delta": {"content": "%s"}}]}']
    for text, outcome in (
        (r"{\"color\": \"red\", \"big\": true}", COMPLETE),
        (r"{\"color\": \"red\"}", WRONG),
        (r"{\"color\"", WRONG),
    ):
        assert fed("chat, JSON schema", guided[0] % text, engine="openvino").outcome == outcome


def test_every_api_is_in_flight_and_every_kind_that_an_engine_can_do() -> None:
    apis = {CHAT.path, COMPLETIONS.path, PREDICTIONS.path, RESPONSES.path, TRITON.path}
    for engine in scenario.ENGINES:
        fits = kinds.of_engine(engine)
        own = {MESSAGES.path} if engine == "mock" else set()
        assert {kind.api.path for kind in fits} == apis | own
    assert "LoRA" in kinds.left_out("openvino")
    assert "JSON schema" in kinds.left_out("mock")
    assert len(KIND) == len(KINDS)


def test_streams_are_counted_by_kind_of_request() -> None:
    outcomes = {"chat": Counter({COMPLETE: 3, OTHER: 1, "E2105": 2}), "completions": Counter()}
    table = report.by_kind([Record(event=EVENT, kinds=outcomes)])
    assert ["chat", "mock", "6", "3", "1", "0", "2"] in table.rows


def test_missed_aims_are_told() -> None:
    behind = Scenario.model_validate(FIRST)
    assert report.missed(behind, Record(event=EVENT, back_s=2.0)) == []
    bad = Record(event=EVENT, back_s=None, lost=1, wrong=2, hung=3, descriptors=4)
    assert report.missed(behind, bad) == [
        *("1 lost", "2 wrong text", "3 hung", "4 left"),
        "back after None s, not 120 s",
    ]


def test_a_server_takes_so_many_faults() -> None:
    scenarios = scenario.read_all()
    events = scenario.plan(scenarios, "openvino", 200, seed=1)
    lives = scenario.lives(scenarios, events)
    assert sorted(one.number for life in lives for one in life) == list(range(200))
    for life in lives:
        setups = {scenarios[one.scenario].setup for one in life}
        assert len(setups) == 1
        assert len(life) <= (20 if setups == {Setup()} else 5)
    assert max(map(len, lives)) > 5
    # A run that is cut short has had all kinds.
    assert {life[0].scenario for life in lives[:20]} >= {"clock_jump", "cut_download", "rank"}


def test_a_run_is_resumed_with_its_own_plan_alone(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    Records(path, HEADER, resume=True).add(Record(event=EVENT, back_s=1.5))
    newer = Records(path, HEADER.model_copy(update={"commit": "c2"}), resume=True)
    assert newer.done == {0}
    newer.add(Record(event=EVENT.model_copy(update={"number": 1})))
    told = report.markdown(newer.header, newer.all, [report.grid({}, [])], [])
    assert "commit c1 (1 faults), c2 (1 faults), seed 1" in told
    other = HEADER.model_copy(update={"seed": 2})
    with pytest.raises(RecordsError, match="--seed=1 --faults=2 --engine=mock"):
        Records(path, other, resume=True)
    assert Records(path, other, resume=False).done == set()


def test_growth_is_of_one_server() -> None:
    grown = [(0, 100.0), (7, 300.0), (0, 130.0), (7, 310.0), (7, 0.0)]
    records = [Record(event=EVENT, server=server, memory_mb=mb) for server, mb in grown]
    assert report.growth_mb(records) == 30


def test_the_table_goes_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.MARKS[0]}old\n{report.MARKS[1]}\nafter\n")
    records = [Record(event=EVENT, in_flight=32, back_s=seconds) for seconds in (1.0, 3.0)]
    table = report.grid({"kill": Scenario.model_validate(FIRST)}, records)
    told = report.markdown(HEADER, records, [table, report.returns(records)], ["a note"])
    write_between(page, report.MARKS, told)
    text = page.read_text()
    assert "old" not in text
    assert "| killed | mock | 2 | 64 | 0 | 0 | 0 | " in text
    assert "| engine | mock | 2 | 2.0 | 2.8 | 3.0 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no marks"):
        write_between(page, report.MARKS, "")
