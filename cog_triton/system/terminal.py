"""Terminal output of ``cog-triton``'s commands, and their ends: by a coded error, by a signal."""

from __future__ import annotations

import errno
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.markup import escape

from cog_triton.errors import BuildCancelled, CogTritonError, InvalidArgument
from cog_triton.system.printable import printable, shortened

__all__ = ["cancellable", "coded_errors", "err", "escape", "out", "tagged"]

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def tagged(line: str) -> str:
    """`line` for stdout: in a terminal with colours, the ``[tag]`` that begins it is coloured."""
    tag = re.match(r"\[[\w ]+\]", line) if out.color_system and not out.no_color else None
    return f"\x1b[36m{tag[0]}\x1b[0m{line[tag.end() :]}" if tag else line


@contextmanager
def coded_errors() -> Iterator[None]:
    """Context that turns a coded error into one line and exit code 1, without a traceback.

    So it does a path that no file system takes: wherever one is asked for, it is what was given.
    """
    try:
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise InvalidArgument(f"{shortened(error.filename)}: {error.strerror}") from None
    except CogTritonError as error:
        text = printable(str(error), keep="\n\t")
        err.print(f"[bold red]error:[/] {escape(text)}")
        raise typer.Exit(1) from None


@contextmanager
def cancellable() -> Iterator[None]:
    """Turn SIGTERM and KeyboardInterrupt into BuildCancelled; may be nested."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise BuildCancelled("the build was interrupted") from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
