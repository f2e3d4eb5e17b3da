"""Progress of a build: a bar in a terminal; in a log, numbered stages and a sign of life."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console

from cog_triton.builder.workspace import Echo
from cog_triton.system.terminal import err
from cog_triton.system.terminal_progress import ProgressLine, duration

QUIET_S = 4.0
"""Seconds without a line after which a log gets one."""


class BuildProgress:
    """Context in which a build prints its lines by `echo`, and names each stage by `begin`.

    A terminal shows a bar below the lines. A log gets a line for each stage, and one whenever
    nothing was printed for a few seconds, so that what is silent can be told from what hangs.

    Args:
        stages: how many stages there are.
        console: where the bar is drawn; if it is no terminal, the lines are those of a log.
    """

    def __init__(self, echo: Echo, stages: int, console: Console = err) -> None:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._to_log:
            self._thread.join()
        self._line.__exit__(kind, error, trace)
