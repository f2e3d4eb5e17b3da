"""Parallel work on items in daemon threads, ended together by the first error."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_POLL_S = 0.1
_JOIN_S = 1.0
Item = TypeVar("Item")


def in_parallel(
    items: Iterable[Item],
    work: Callable[[Item], None],
    most: int,
    halt: threading.Event,
    check: Callable[[], None],
) -> None:
    """Call `work` for each of `items`, in order, in up to `most` threads.

    Args:
        halt: set when `work` is to return, after an error or at the end.
        check: called all the while in this thread; may raise to cancel.

    Raises:
        The first error of `work`, or what `check` raises.
    """
    todo: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not halt.is_set():
                work(todo.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)
            halt.set()

    # Daemons: an interrupted process does not wait for a silent server.
    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(most, todo.qsize()))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL_S)
                check()
                if errors:
                    break
    finally:
        halt.set()
        for thread in threads:
            if thread.is_alive():
                thread.join(_JOIN_S)
    if errors:
        raise errors[0]
