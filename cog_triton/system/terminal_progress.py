"""Progress of long work: a bar in a terminal; in a log, numbered stages and a sign of life."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from cog_triton.system.terminal import err

QUIET_S = 4.0
"""Seconds without a line after which a log gets one."""


class ProgressLine:
    """The last line of a terminal while work goes on; what is printed scrolls above it.

    Printed by `print`: click's echo writes past the redirection.

    Args:
        steps: how many steps there are; 0 if they are not counted.
        console: where it is drawn; default stderr. Nothing is drawn if that is no terminal.
    """

    def __init__(self, steps: int = 0, console: Console = err) -> None:
        self._steps, self._begun = steps, 0
        bar: list[ProgressColumn] = [BarColumn(bar_width=20)] if steps else []
        self._bar = (
            Progress(
                SpinnerColumn(),
                *bar,
                TextColumn("{task.description}"),
                Elapsed(),
                console=console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            if console.is_terminal
            else None
        )
        self._task = self._bar.add_task("", visible=False) if self._bar else None

    def begin(self, name: str) -> None:
        """Begin the step `name`, with a clock of its own."""
        self._begun += 1
        if self._bar is not None and self._task is not None:
            count = f"step {self._begun} of {self._steps}: " if self._steps else ""
            self._bar.reset(
                self._task,
                description=f"{count}{escape(name)}",
                total=self._steps or None,
                completed=self._begun - 1,
                visible=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Remove the line."""
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """`seconds` as ``1 h 2 min 5 s``, or ``0.4 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or f"{seconds:.1f} s"


class BuildProgress:
    """Context in which a build prints its lines by `echo`, and names each stage by `begin`.

    A terminal shows a bar below the lines. A log gets a line for each stage, and one whenever
    nothing was printed for a few seconds, so that what is silent can be told from what hangs.

    Args:
        stages: how many stages there are.
        console: where the bar is drawn; if it is no terminal, the lines are those of a log.
    """

    def __init__(self, echo: Callable[[str], None], stages: int, console: Console = err) -> None:
        self._echo, self._stages = echo, stages
        self._line = ProgressLine(stages, console)
        self._to_log = not console.is_terminal
        self._began = self._begun_at = self._said_at = time.monotonic()
        self._stage, self._number = "", 0
        self._printing = threading.Lock()  # a line and its line feed may be two writes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._give_signs_of_life, daemon=True)

    @property
    def elapsed(self) -> str:
        """Time since the build began, as ``2 min 5 s``."""
        return duration(time.monotonic() - self._began)

    def echo(self, line: str) -> None:
        """Print a line."""
        with self._printing:
            self._said_at = time.monotonic()
            self._echo(line)

    def begin(self, stage: str) -> None:
        """Name the stage that begins."""
        self._stage, self._begun_at = stage, time.monotonic()
        self._number += 1
        self._line.begin(stage)
        if self._to_log:
            self.echo(f"{self._where()}, {self.elapsed} since the start")

    def _where(self) -> str:
        return f"[step {self._number} of {self._stages}] {self._stage}"

    def _give_signs_of_life(self) -> None:
        # Where a line cannot be printed, the build's own next one fails and ends it.
        with contextlib.suppress(OSError, ValueError):
            while not self._over.wait(QUIET_S / 8):
                now = time.monotonic()
                if now - self._said_at >= QUIET_S and self._stage:
                    self.echo(f"{self._where()}: running for {duration(now - self._begun_at)}")

    def __enter__(self) -> Self:
        self._line.__enter__()
        if self._to_log:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._to_log:
            self._thread.join()
        self._line.end()
