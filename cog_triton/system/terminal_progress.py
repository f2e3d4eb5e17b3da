"""Progress line of long work: bar, step n of m and time in a terminal, nothing in a log."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from cog_triton.system.terminal import err


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

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """`seconds` as ``1 h 2 min 5 s``, or ``0.4 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{n} {unit}" for n, unit in parts if n) or f"{seconds:.1f} s"
