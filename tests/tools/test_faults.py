"""Fault harness: its ledger misses nothing, a strike hits who is named, scenarios are strict."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults import engines, runner, sandbox, scenario, strikes
from faults.apis import COMPLETE, CUT, ENDED, FLAVOURS, KINDS, OTHER, WRONG, Answer, Question
from faults.attack import Findings
from faults.hostile_inputs import Inputs, hostile
from faults.ledger import Ledger, LedgerError
from faults.scenario import ScenarioError
from faults.strikes import STRIKES, NoVictim, Strike
from faults.target import served

TEXT = "one two three"
QUESTION = Question("Count.", 3, TEXT, dict.fromkeys(FLAVOURS, TEXT))
KIND = {kind.name: kind for kind in KINDS}
E2105 = '{"error": "E2105 TritonUnavailable: x"}'
USAGE = '{"choices": [], "usage": {"completion_tokens": 3}}'
PIECES = ['{"choices": [{"text": "one two"}]}', '{"choices": [{"text": " three"}]}']
WHOLE = '{"status": "succeeded", "metrics": {"output_token_count": 3}, "output": ["one two three"]}'


def answered(kind: str, *events: str, engine: str = "mock", broken: str | None = None) -> Answer:
    answer = Answer(KIND[kind], engine, QUESTION, 0.0)
    answer.begin(200, {})
    for at, event in enumerate(events):
        data = f"data: {event}\n\n" if answer.streamed else event
        answer.body(data.encode(), float(at))
    answer.end(9.0, broken)
    return answer


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (answered("completions", *PIECES, USAGE), COMPLETE),
        (answered("completions", PIECES[0], USAGE), WRONG),
        (answered("completions", *PIECES, *PIECES, USAGE), WRONG),
        (answered("completions", *reversed(PIECES), USAGE), WRONG),
        (answered("completions", PIECES[0], broken="connection closed"), CUT),
        (answered("completions", PIECES[0], E2105), "E2105"),
        (answered("Triton's generate_stream", E2105), ENDED),
        (answered("predictions", '{"chunk": "one", "index": 1}'), WRONG),
        (answered("predictions, whole", WHOLE), COMPLETE),
        (answered("predictions, whole", WHOLE.replace("two", "too")), WRONG),
        (answered("predictions, whole", WHOLE.replace("3}", "2}")), WRONG),
        (answered("chat, whole", '{"choices": [{"message": {}}]}', engine="openvino"), WRONG),
        (
            answered(
                "chat, whole",
                '{"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 3}}',
                engine="openvino",
            ),
            OTHER,
        ),
    ],
)
def test_an_answer_is_compared_with_its_known_text(answer: Answer, outcome: str) -> None:
    assert answer.outcome == outcome, str(answer)


def test_the_ledger_finds_lost_doubled_and_cut_streams() -> None:
    ledger = Ledger()
    flight = [
        answered("completions", *PIECES, USAGE),
        answered("completions", PIECES[0], broken="connection closed"),
        answered("completions", *PIECES, *PIECES, USAGE),
        answered("completions", PIECES[0]),
    ]
    newcomer, uncoded = answered("completions", E2105), answered("completions", '{"error": "x"}')
    for one in (*flight, newcomer, uncoded):
        ledger.begin(one)
    for one in (*flight[:3], newcomer, uncoded):
        ledger.end(one)
    del ledger.open[flight[3]]  # nobody waits for it, and it has not ended
    account = ledger.account(flight)
    assert (account.flight, account.lost, account.wrong, account.hung) == (4, 3, 1, 0)
    assert account.ends == {
        **{COMPLETE: 1, CUT: 1, WRONG: 1},
        **{"newcomer: E2105": 1, "newcomer: without a code": 1},
    }
    assert len(account.problems) == 4
    with pytest.raises(LedgerError, match="closed twice"):
        ledger.end(flight[0])


def test_what_a_scenario_allows_is_not_lost() -> None:
    for path, lost in (("v1", 0), ("v2", 1)):
        ledger, cut = Ledger(), answered("completions", PIECES[0], broken="connection closed")
        ledger.begin(cut)
        ledger.end(cut)
        assert ledger.account([cut], {CUT: [path]}).lost == lost


@pytest.fixture
def tree() -> Iterator[Any]:
    """A process with two children, which have the command lines of Triton and a stub of it."""
    code = "import os, time\nfor words in (['tritonserver'], ['x_stub', '/r/ensemble/1/m.py']):\n"
    code += "    os.spawnv(os.P_NOWAIT, '/bin/sh', [*words[:1], '-c', 'sleep 60; :', *words[1:]])\n"
    code += "print(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        yield SimpleNamespace(pid=parent.pid)
        parent.kill()


def test_a_strike_hits_the_named_process(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(strikes.processes, "send", lambda pid, number: sent.append((pid, number)))
    asyncio.run(Strike("kill", "tritonserver").inject(tree))
    ((pid, number),) = sent
    assert number == 9
    assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"tritonserver\0")
    monkeypatch.setattr(strikes, "_VICTIM_S", 0.1)
    with pytest.raises(NoVictim, match="no process is a 'engine'"):
        asyncio.run(Strike("kill", "engine").inject(tree))


@pytest.mark.integration
def test_a_server_is_struck_once_and_every_stream_is_accounted_for() -> None:
    with engines.prepared("mock") as start, served(start) as target:
        account = runner.struck(target, "mock", Strike("kill", "engine"), streams=6)
    assert account.problems == []
    assert account.flight >= 3
    assert sum(count for end, count in account.ends.items() if "newcomer" not in end) >= 3
    assert account.back_s is not None
    assert not any(account.held.values())


NO_GROUP = STRIKES["out of memory"].lacking()


@pytest.mark.skipif(NO_GROUP is not None, reason=str(NO_GROUP))
def test_the_kernel_kills_what_is_out_of_memory_and_no_group_is_left() -> None:
    async def killed() -> int:
        held = "import time; held = bytearray(b'x') * (64 << 20); time.sleep(60)"
        victim = await asyncio.create_subprocess_exec(sys.executable, "-c", held)
        await strikes.oom_kill(victim.pid)
        return await victim.wait()

    assert asyncio.run(killed()) == -9
    files = ("memory.max", "memory.limit_in_bytes")
    owner = (
        "import os, sys; from faults import sandbox; made = sandbox.group('left', *sys.argv[1:])"
    )
    owner += "; print(made.__enter__()); sys.stdout.flush(); os._exit(0)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", owner, "left", *files]
    left = Path(subprocess.check_output(command, env=environment, text=True).strip())
    assert left.is_dir()
    sandbox.clear()
    assert not left.exists()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a: {fault: kill}", "a.report"),
        ("a: {report: a, fault: burn}", "a.fault"),
        ("a: {report: a, fault: kill, victims: []}", "a.victims"),
        ("a: {report: a, fault: kill, laod: 3}", "a.laod"),
        ("a: {report: a, fault: kill, after: [3, 1]}", "a.after"),
        ("just text", "the file"),
    ],
)
def test_a_wrong_scenario_is_refused_by_file_and_key(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        scenario.read(path)
    assert str(refused.value).startswith(f"{path}: {key}: ")


def test_a_seed_plans_every_scenario_and_stops_every_victim() -> None:
    scenarios = scenario.read()
    drawn = scenario.plan(scenarios, "mock", 100, seed=3)
    assert drawn == scenario.plan(scenarios, "mock", 100, seed=3)
    assert drawn != scenario.plan(scenarios, "mock", 100, seed=4)
    stops = scenario.stops(scenarios, "mock", seed=3)
    assert {one.scenario for one in (*drawn, *stops)} == set(scenarios)
    assert {one.victim for one in stops if one.scenario == "drain"} == {*scenarios["drain"].victims}
    lives = scenario.lives(scenarios, drawn)
    assert sorted(one for life in lives for one in life) == drawn
    assert all(len({scenarios[one.scenario].setup for one in life}) == 1 for life in lives)
    # A run that is cut short has had all kinds.
    assert {one.scenario for life in lives[:8] for one in life} == {one.scenario for one in drawn}
    with pytest.raises(ScenarioError, match="--only=burn: must be of kill, "):
        scenario.read(only=("burn",))


@pytest.mark.parametrize(
    ("answer", "problems"),
    [
        (b"HTTP/1.1 503 x\r\n\r\nE2105 TritonUnavailable: x", []),
        (b"HTTP/1.1 503 x\r\n\r\nbroken", ["503 without a code"]),
        (b"HTTP/1.1 431 x\r\n\r\n", ["431 without a code"]),
        (b"HTTP/1.1 404 x\r\n\r\nnot here", []),
        (b"", []),
    ],
)
def test_hostile_inputs_need_an_answer_with_a_code(answer: bytes, problems: list[str]) -> None:
    findings = Findings()
    findings.take(answer, "it")
    assert list(findings.problems) == problems


def test_a_seed_sends_the_same_hostile_bytes() -> None:
    first, same, other = (list(hostile(random.Random(seed))) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    fuzz = [[Inputs(seed).next() for _ in range(9)] for seed in (1, 1, 2)]
    assert fuzz[0] == fuzz[1] != fuzz[2]
