"""Cancellation by signals: Ctrl-C and SIGTERM as a coded error."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from cog_triton.errors import BuildCancelled


@contextlib.contextmanager
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
