"""Progress display: one changing line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from cog_triton.bench.load_generator import Progress
from cog_triton.bench.options import Options

_PLAIN_S = 5.0
_CLEAR = "\r\x1b[2K"


@contextmanager
def display(console: Console, options: Options) -> Iterator[Callable[[Progress, float], None]]:
    """The callback for `measurement.measure`; a terminal's line is removed at the end.

    It runs on the load generator's event loop, so that it writes bare text: 10 us, where rich's
    live display takes milliseconds.
    """
    if console.is_terminal and not console.is_dumb_terminal:

        def changing(progress: Progress, seconds: float) -> None:
            console.file.write(_CLEAR + line(options, progress, seconds)[: console.width - 1])
            console.file.flush()

        try:
            yield changing
        finally:
            console.file.write(_CLEAR)
            console.file.flush()
        return
    due = _PLAIN_S

    def plain(progress: Progress, seconds: float) -> None:
        nonlocal due
        if seconds >= due:
            due += _PLAIN_S
            console.print(line(options, progress, seconds), markup=False)

    yield plain


def line(options: Options, progress: Progress, seconds: float) -> str:
    """Text of the line: seconds, requests and tokens so far."""
    of = f" of {options.duration:g}" if options.duration else ""
    wanted = f" of {options.requests}" if options.requests else ""
    failed = f", {progress.failed} failed" if progress.failed else ""
    rate = progress.tokens / seconds if seconds > 0 else 0.0
    level = f"{options.rate:g} {options.unit.value}: "
    return (
        f"{level}{seconds:.0f}{of} s: {progress.done}{wanted} done, {progress.running} running"
        f"{failed}, {rate:.0f} output tokens/s"
    )
