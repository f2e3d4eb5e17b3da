"""Progress of downloads: a bar in a terminal, periodic lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

Echo = Callable[[str], None]
_INTERVAL_S = 10.0
_STEP = 0.1
_MIN_INTERVAL_S = 1.0
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Progress:
    """Byte counter of one download, for any thread.

    Within ``with``: a bar on stderr if that is a terminal; else `echo` gets a line each 10 s or
    10 %, at most one a second, and one at the end if all went well.

    Args:
        name: what is fetched, redacted.
        total: bytes to fetch, None while unknown.
        tag: what is done, as the lines begin.
        console: the terminal to draw in; default stderr, if it is one.
    """

    def __init__(
        self,
        name: str,
        echo: Echo,
        total: int | None = None,
        *,
        tag: str = "download",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = f"[{tag}] {name}"
        self.total = total
        self.done = 0
        self._fetched = 0
        self._echo, self._clock = echo, clock
        self._lock = threading.Lock()
        self._start = self._echoed_at = clock()
        self._echoed = 0
        self._bar = _bar(console)
        self._task = self._bar.add_task(self.name, total=total) if self._bar else None

    def expect(self, total: int) -> None:
        """Raise the total to `total` bytes."""
        self.total = max(self.total or 0, total)

    def skip(self, count: int) -> None:
        """Count `count` bytes as done that were not fetched now; a negative number takes back."""
        with self._lock:
            self.done += count
            self._echoed = min(self._echoed, self.done) if count < 0 else self.done

    def advance(self, count: int) -> None:
        """Count `count` fetched bytes."""
        with self._lock:
            self.done += count
            self._fetched += count
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=self.done, total=self.total)
                return
            waited, step = self._clock() - self._echoed_at, self.done - self._echoed
            tenth = self.total and step >= _STEP * self.total
            if waited >= _INTERVAL_S or (waited >= _MIN_INTERVAL_S and tenth):
                self._echoed_at, self._echoed = self._clock(), self.done
                self._echo(self._line())

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self._fetched:
            seconds = self._clock() - self._start
            rate = size_text(self._rate())
            self._echo(f"{self.name} {size_text(self.done)} in {_duration(seconds)}, {rate}/s")

    def _line(self) -> str:
        rate = size_text(self._rate())
        if self.total is None:
            return f"{self.name} {size_text(self.done)}, {rate}/s"
        unit, factor = _unit(self.total)
        left = max(self.total - self.done, 0) / max(self._rate(), 1)
        done = f"{self.done / factor:.1f} of {self.total / factor:.1f} {unit}"
        return f"{self.name} {done}, {rate}/s, {_duration(left)} left"

    def _rate(self) -> float:
        return self._fetched / max(self._clock() - self._start, 1e-3)


def size_text(count: float) -> str:
    """Human-readable size: ``13.0 GB``, ``310 MB``."""
    unit, factor = _unit(count)
    return f"{count / factor:.{1 if factor >= 1e9 else 0}f} {unit}"


def _unit(count: float) -> tuple[str, float]:
    return next(((unit, factor) for factor, unit in _UNITS if count >= factor), ("B", 1.0))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _bar(console: Console | None) -> Bar | None:
    from rich import progress  # servers that download nothing start without it

    from cog_triton.system.terminal import err

    if console is None and not err.is_terminal:
        return None
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    # `err` is the console of a progress line around this one, too.
    return progress.Progress(*columns, console=console or err, redirect_stdout=sys.stdout.isatty())
