"""Attack harness: the same bytes for a seed, every way to stop, and what counts as a failure."""

from __future__ import annotations

import random

import pytest
from _attack_clients import Findings
from _attack_inputs import PORTS, Hostile, Inputs, hostile
from _control_stream import User
from _drained import PLAN

KINDS = {"unterminated tokens", "bombs", "upgrade", "headers", "Triton's parameters"}


def test_a_seed_gives_the_same_bytes() -> None:
    classes, ports, differ = set(), set(), False
    for one, same, other in zip(*(hostile(random.Random(n)) for n in (1, 1, 2)), strict=True):
        assert one == same
        differ |= one != other
        classes.add(one.kind)
        ports.add(one.port)
    assert differ
    assert classes == {*KINDS, "Triton's control"}
    assert ports == set(PORTS)
    fuzz = [[Inputs(seed).next() for _ in range(1)] for seed in (1, 1, 2)]
    assert fuzz[0] == fuzz[1] != fuzz[2]


def test_strings_of_escaped_quotes_never_end_on_both_sides_of_the_door() -> None:
    found = [one for one in hostile(random.Random(1)) if one.name.startswith("escaped quotes")]
    assert len(found) == 6
    for one in found:
        body = one.data.partition(b"\r\n\r\n")[2]
        assert body.startswith(b"[" * 65 + b'"\\"\\"')
        assert body.replace(b'\\"', b"").count(b'"') == 1
    assert {len(one.data) < 1 << 16 for one in found} == {True, False}


@pytest.mark.parametrize(
    ("answer", "wanted", "problem"),
    [
        (b"HTTP/1.1 503 x\r\n\r\nE2105 TritonUnavailable: x", "", None),
        (b"HTTP/1.1 503 x\r\n\r\nbroken", "", "503 without a code"),
        (b"HTTP/1.1 431 x\r\n\r\n", "", "431 without a code"),
        (b"HTTP/1.1 404 x\r\n\r\nnot here", "", None),
        (b"HTTP/1.1 400 x\r\n\r\nE1005 InvalidArgument: x", "2", "400, not 1 of 2.."),
        (b'HTTP/1.1 200 x\r\n\r\n{"error":"x"}', "", "an error as 200"),
        (b"", "", None),
    ],
)
def test_answers_need_a_code_and_their_status(
    answer: bytes, wanted: str, problem: str | None
) -> None:
    findings = Findings()
    findings.take(answer, "it", Hostile("headers", "it", "triton", b"", status=wanted))
    assert list(findings.problems) == ([] if problem is None else [problem])


def test_silences_are_measured_while_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 9.0])
    monkeypatch.setattr("_control_stream.now", lambda: next(clock))
    user = User()
    user.heard(2.0)
    assert user.take() == 2.0
    assert user.take() == 7.0


def test_drains_are_of_both_commands_with_and_without_a_death() -> None:
    deaths = {(as_image, killed) for as_image, sent, killed in PLAN if sent == "SIGTERM"}
    assert {killed for _, killed in deaths} == {"", "engine", "stub tensorrt_llm", "tritonserver"}
    assert {(not as_image, killed) for as_image, killed in deaths} == deaths
