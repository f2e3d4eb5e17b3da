"""Progress of a build: numbered stages, elapsed time and signs of life in a log, a bar else."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from cog_triton.download.transfer_progress import Progress
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


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # the caller's may be dumb, which shows no bar


def test_a_log_gets_a_line_for_every_tenth() -> None:
    lines: list[str] = []
    now = [0.0]
    with Progress("a.tar", lines.append, 13_000_000_000, clock=lambda: now[0]) as progress:
        progress.skip(1_000_000_000)
        for _ in range(12):
            now[0] += 4
            progress.advance(1_000_000_000)
    assert lines == [
        "[download] a.tar 3.0 of 13.0 GB, 250 MB/s, 40 s left",
        "[download] a.tar 5.0 of 13.0 GB, 250 MB/s, 32 s left",
        "[download] a.tar 7.0 of 13.0 GB, 250 MB/s, 24 s left",
        "[download] a.tar 9.0 of 13.0 GB, 250 MB/s, 16 s left",
        "[download] a.tar 11.0 of 13.0 GB, 250 MB/s, 8 s left",
        "[download] a.tar 13.0 of 13.0 GB, 250 MB/s, 0 s left",
        "[download] a.tar 13.0 GB in 48 s, 250 MB/s",
    ]


def test_a_slow_download_gets_a_line_every_ten_seconds() -> None:
    lines: list[str] = []
    now = [0.0]
    with Progress("a", lines.append, clock=lambda: now[0]) as progress:
        for second in range(25):
            now[0] = float(second)
            progress.advance(1000)
    assert lines == ["[download] a 11 kB, 1 kB/s", "[download] a 21 kB, 1 kB/s", lines[-1]]


def test_a_terminal_gets_a_bar() -> None:
    lines: list[str] = []
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Progress("a[b].tar", lines.append, 2_000_000, console=console) as progress:
        progress.advance(2_000_000)
    assert lines == []
    assert "[download] a[b].tar" in screen.getvalue()
    assert "2.0/2.0 MB" in screen.getvalue()
