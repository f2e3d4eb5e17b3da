"""Progress of a build: numbered stages, elapsed time and signs of life in a log, a bar else."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
from rich.console import Console

from cog_triton.system import terminal
from cog_triton.system import terminal_progress as progress_module
from cog_triton.system.terminal_progress import BuildProgress

LOG = Console(file=io.StringIO())


def test_a_log_has_numbered_stages_with_the_time() -> None:
    lines: list[str] = []
    with BuildProgress(lines.append, 2, LOG) as progress:
        progress.begin("convert")
        progress.echo("[convert] a line")
        progress.begin("build")
    assert [re.sub(r"[\d.]+ s", "N s", line) for line in lines] == [
        "[step 1 of 2] convert, N s since the start",
        "[convert] a line",
        "[step 2 of 2] build, N s since the start",
    ]
    assert re.fullmatch(r"[\d.]+ s", progress.elapsed)


def test_a_silent_stage_gives_signs_of_life_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "QUIET_S", 0.05)
    lines: list[str] = []
    alive = threading.Event()

    def echo(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            alive.set()

    with BuildProgress(echo, 1, LOG) as progress:
        progress.begin("build")
        assert alive.wait(30)
    assert all(line.startswith("[step 1 of 1] build: running for ") for line in lines[1:3])


def test_a_log_that_is_closed_ends_only_the_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "QUIET_S", 0.05)
    tried = threading.Event()

    def echo(line: str) -> None:
        if ": running" in line:
            tried.set()
            raise BrokenPipeError

    with BuildProgress(echo, 1, LOG) as progress:
        progress.begin("build")
        assert tried.wait(30)


def test_a_terminal_has_a_bar_and_no_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    lines: list[str] = []
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, highlight=False)
    with BuildProgress(lines.append, 4, console) as progress:
        progress.begin("check")
        progress.begin("model")
    assert lines == []
    assert "step 2 of 4: model" in screen.getvalue()
    assert "\u2501" in screen.getvalue()


def test_tags_are_coloured_in_a_terminal_with_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(line: str, **options: object) -> str:
        console = Console(file=io.StringIO(), **options)  # type: ignore[arg-type]
        monkeypatch.setattr(terminal, "out", console)
        return terminal.tagged(line)

    colours = {"force_terminal": True, "color_system": "standard"}
    assert shown("[build] [x] y", **colours) == "\x1b[36m[build]\x1b[0m [x] y"
    assert shown("no tag", **colours) == "no tag"
    assert shown("[build] y", **colours, no_color=True) == "[build] y"
    assert shown("[build] y") == "[build] y"


def test_a_sign_of_life_does_not_run_into_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "QUIET_S", 0.05)
    written: list[str] = []
    alive = threading.Event()

    def echo(line: str) -> None:
        written.append(line)
        if ": running" in line:
            alive.set()
            time.sleep(0.1)  # as a print that is interrupted before its line feed
        written.append("\n")

    with BuildProgress(echo, 1, LOG) as progress:
        progress.begin("build")
        assert alive.wait(30)
        progress.echo("[build] a line")
    assert set(written[1::2]) == {"\n"}
    assert "\n" not in written[::2]
