"""Progress line of long work: step n of m and elapsed time in a terminal, nothing in a log."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typing_extensions import Self

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
        self._bar = (
            Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
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
            self._bar.reset(self._task, description=f"{count}{escape(name)}", visible=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
