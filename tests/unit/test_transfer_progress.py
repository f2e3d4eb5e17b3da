"""Progress of a download in a log and in a terminal."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest
from rich.console import Console

from cog_triton.download.transfer_progress import Progress, size_text


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


def test_no_summary_for_nothing_or_a_failure() -> None:
    lines: list[str] = []
    with Progress("a", lines.append, 10) as progress:
        progress.skip(10)
    with suppress(ValueError), Progress("a", lines.append, 10) as progress:
        progress.advance(5)
        raise ValueError
    assert lines == []


def test_a_terminal_gets_a_bar() -> None:
    lines: list[str] = []
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Progress("a[b].tar", lines.append, 2_000_000, console=console) as progress:
        progress.advance(2_000_000)
    assert lines == []
    assert "[download] a[b].tar" in screen.getvalue()
    assert "2.0/2.0 MB" in screen.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (310e6, "310 MB"), (13e9, "13.0 GB"), (2.5e12, "2.5 TB")],
)
def test_sizes_are_human_readable(count: float, text: str) -> None:
    assert size_text(count) == text
