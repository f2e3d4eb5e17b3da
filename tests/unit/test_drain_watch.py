"""Graceful drain: triggered by a file, or by a port that is no longer listened on."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from scripted_server import wait_until

from cog_triton.serving import drain_watch
from cog_triton.serving.drain_watch import request_drain
from cog_triton.system.ports import free_ports

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_watch, "_POLL_S", 0.005)


def test_drain_is_called_once_when_the_listener_closes() -> None:
    told = threading.Semaphore(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        drain_watch.start(listener.getsockname()[1], None, lambda _: told.release())
        assert not told.acquire(timeout=0.1)
    assert told.acquire(timeout=PATIENCE_S)
    assert not told.acquire(timeout=0.1)


def test_drain_waits_for_a_listener_to_appear() -> None:
    told = threading.Event()
    (port,) = free_ports(1)
    drain_watch.start(port, None, lambda _: told.set())
    assert not told.wait(0.1)
    with socket.create_server(("127.0.0.1", port)):
        assert not told.wait(0.1)
    assert told.wait(PATIENCE_S)


def test_drain_file_triggers_drain_and_is_removed_after_it(tmp_path: Path) -> None:
    file = tmp_path / "drain"
    told, ended = threading.Event(), threading.Event()

    def end(seconds: float | None) -> None:
        assert seconds is None
        told.set()
        assert ended.wait(PATIENCE_S)

    drain_watch.start(free_ports(1)[0], file, end)
    assert not told.wait(0.1)
    file.touch()
    assert told.wait(PATIENCE_S)
    assert file.exists()
    ended.set()
    wait_until(lambda: not file.exists())


def test_a_drain_file_may_limit_the_time(tmp_path: Path) -> None:
    file = tmp_path / "made" / "drain"
    limits: list[float | None] = []
    drain_watch.start(free_ports(1)[0], file, limits.append)
    request_drain(file, 1.5)
    wait_until(lambda: not file.exists())
    assert limits == [1.5]
    assert list(file.parent.iterdir()) == []
