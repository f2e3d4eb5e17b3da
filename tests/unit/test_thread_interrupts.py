"""Asynchronous exceptions of coglet: it finds no thread of a prediction."""

from __future__ import annotations

import _thread
import itertools
import threading

import pytest

from cog_triton.serving.coglet import concurrent_streaming

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "get_ident", threading.get_ident)
    concurrent_streaming.disable_interrupts()


def test_python_code_gets_its_own_identifier() -> None:
    idents: list[int] = []
    thread = threading.Thread(target=lambda: idents.append(threading.get_ident()))
    thread.start()
    thread.join()
    assert idents == [thread.ident]
    assert threading.get_ident() == _thread.get_ident()
    assert threading.current_thread() is threading.main_thread()


def test_native_code_gets_that_of_no_thread() -> None:
    """As coglet calls it: on a thread without a Python frame."""
    idents: list[int] = []
    ended = _thread.allocate_lock()
    ended.acquire()
    calls = itertools.chain(
        itertools.starmap(threading.get_ident, [()]), itertools.starmap(_released, [(ended,)])
    )
    _thread.start_new_thread(idents.extend, (calls,))
    assert ended.acquire(timeout=PATIENCE_S)
    assert idents[:1] == [concurrent_streaming.NO_THREAD]


def _released(lock: _thread.LockType) -> int:
    lock.release()
    return -1
