"""Progress line in a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cog_triton.system.terminal_progress import ProgressLine


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # the caller's may be dumb, which shows no bar


def test_a_terminal_shows_the_step_and_what_is_printed_above_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, highlight=False)
    with ProgressLine(5, console) as line:
        line.begin("model")
        line.begin("quantize [q8_0]")
        console.print("[quantize] a line", markup=False)
    shown = screen.getvalue()
    assert "step 1 of 5: model" in shown
    assert "step 2 of 5: quantize [q8_0]" in shown
    assert "\r\x1b[2K[quantize] a line\n" in shown


def test_steps_need_not_be_counted() -> None:
    screen = io.StringIO()
    with ProgressLine(console=Console(file=screen, force_terminal=True, width=80)) as line:
        line.begin("loading the engine")
    assert "step" not in screen.getvalue()
    assert "loading the engine" in screen.getvalue()


def test_a_log_gets_nothing() -> None:
    screen = io.StringIO()
    with ProgressLine(5, Console(file=screen)) as line:
        line.begin("model")
    assert screen.getvalue() == ""
