"""Where log lines go in Cog 0.23.1's worker, whose stdout and stderr coglet captures."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cog_triton.system.log_format import STDERR, DescriptorHandler


def inherited_stderr() -> int:
    """File descriptor of the stderr that Cog's server was started with.

    coglet 0.23.1 replaces the worker's stderr by a pipe, and wraps every line that it reads there;
    but it keeps the inherited one open under another number, which is recognized by being the
    same file as our parent's stderr.
    """
    with suppress(OSError):
        wanted = Path(f"/proc/{os.getppid()}/fd/{STDERR}").stat()
        for name in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
            descriptor = int(name.name)
            with suppress(OSError):
                if descriptor > STDERR and os.path.samestat(os.fstat(descriptor), wanted):
                    return descriptor
    return STDERR


@contextmanager
def setup_log() -> Iterator[None]:
    """Log lines during setup go to stdout, which coglet makes `setup.logs` of /health-check.

    coglet logs them, too, all as INFO: the process's own handler adds only warnings and errors.
    """
    copies = logging.StreamHandler(sys.stdout)
    copies.setFormatter(_SetupLogFormatter())
    root = logging.getLogger()
    own = [handler for handler in root.handlers if isinstance(handler, DescriptorHandler)]
    root.addHandler(copies)
    for handler in own:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler in own:
            handler.setLevel(logging.NOTSET)
        root.removeHandler(copies)


class _SetupLogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.title()}: {text}"
