"""Cause of a failed step: said once, last, and without the trace that was printed before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_builds import step_of

from cog_triton.builder.step import cause, run_step
from cog_triton.errors import BuildStepFailed

TRACE = """
def load(path):
    raise AttributeError("'NoneType' object has no attribute 'to'")
print("loading")
load("model")
"""
REFUSAL = """
import argparse
parser = argparse.ArgumentParser(prog="convert_checkpoint.py")
for number in range(50):
    parser.add_argument(f"--option_{number}")
parser.parse_args(["--optoin", "1"])
"""


def failure(tmp_path: Path, script: str) -> tuple[list[str], list[str]]:
    """The lines that the step printed, and those of its error."""
    printed: list[str] = []
    with pytest.raises(BuildStepFailed) as caught:
        run_step(step_of(tmp_path, script), tmp_path, tmp_path / "log", printed.append)
    return printed, str(caught.value).splitlines()


def test_exception_is_told_without_its_trace(tmp_path: Path) -> None:
    printed, error = failure(tmp_path, TRACE)
    assert "[build] Traceback (most recent call last):" in printed
    log = tmp_path / "log"
    assert error == [
        f"E2300 BuildStepFailed: step build ended with exit code 1 (its output: {log}):",
        "AttributeError: 'NoneType' object has no attribute 'to'",
    ]
    assert "Traceback" in log.read_text("utf-8")


def test_refusal_is_told_without_the_usage(tmp_path: Path) -> None:
    printed, error = failure(tmp_path, REFUSAL)
    assert sum("--option_" in line for line in printed) > 10
    assert error[1:] == ["convert_checkpoint.py: error: unrecognized arguments: --optoin 1"]


MARK = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], []),
        (["a", "", "b"], ["a", "b"]),
        ([str(n) for n in range(40)], ["35", "36", "37", "38", "39"]),
        ([f"[1] {MARK}", '[1]   File "x.py"', "[1] ValueError: no"], ["ValueError: no"]),  # a rank
        (
            [
                MARK,
                " x",
                "KeyError: 1",
                "",
                "During handling:",
                MARK,
                " y",
                "RuntimeError: CUDA",
                "z",
            ],
            ["RuntimeError: CUDA", "z"],
        ),
        ([MARK, " cut short"], [MARK, " cut short"]),
    ],
)
def test_the_cause_is_the_last_exception_without_its_trace(
    lines: list[str], found: list[str]
) -> None:
    assert cause(lines) == found
