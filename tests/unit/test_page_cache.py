"""Files that are read into the page cache ahead of who needs them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_server import wait_until

from cog_triton.system import page_cache
from cog_triton.system.host_memory import HostMemory

SIZE = 2_000_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    return tmp_path / "weights"


def left(*sizes: int) -> Callable[[], HostMemory]:
    """What is told of memory, again and again."""
    told = iter(sizes)
    return lambda: HostMemory(next(told), "")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_not_cached_is_read(
    cached: bool, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(page_cache, "_is_cached", lambda *_: cached)
    with page_cache.reading_ahead([file, file]):
        wait_until(lambda: "read ahead" in caplog.text)
    assert f"read ahead: {0 if cached else 4} MB of weights" in caplog.text


def test_a_page_that_was_just_read_is_cached(file: Path) -> None:
    with file.open("rb") as opened:
        os.pread(opened.fileno(), SIZE, 0)
        try:
            os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system cannot be asked")
        assert page_cache._is_cached(opened.fileno(), 0)
        assert not page_cache._is_cached(opened.fileno(), SIZE)


def test_it_stops_where_memory_gets_short(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(page_cache, "_is_cached", lambda *_: False)
    monkeypatch.setattr(page_cache, "host_memory", left(1 << 40, page_cache.ROOM - 1))
    with page_cache.reading_ahead([file]):
        wait_until(lambda: "read ahead: 0 MB" in caplog.text)
    assert threads() == []
