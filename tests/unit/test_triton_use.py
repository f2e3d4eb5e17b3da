"""Use of Triton's own API, told by the front door and seen in gRPC's connections."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from cog_triton.serving import triton_use
from cog_triton.serving.admission import Admission
from cog_triton.serving.failure_detection import MemoryLimit
from cog_triton.serving.triton_use import TRITON_USE_VARIABLE, TritonUse, TritonUseReport
from cog_triton.system.ports import free_ports


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TritonUseReport:
    made = TritonUseReport(tmp_path / "a.use")
    monkeypatch.setenv(TRITON_USE_VARIABLE, str(made.file))
    return made


def test_requests_in_flight_and_those_that_ended_just_now_count(
    door: TritonUseReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = TritonUse(*free_ports(1))
    assert not door.file.exists(), "nobody else reads it"
    assert not use.recent()
    with door.request():
        with door.request():
            assert use.recent()
        monkeypatch.setattr(triton_use, "_AFTER_S", 0)
        assert use.recent(), "one is still in flight"
    assert not use.recent()
    monkeypatch.setattr(triton_use, "_AFTER_S", 60)
    assert use.recent()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_to_grpc_count_open_or_closed_by_the_server(family: int) -> None:
    with socket.socket(family) as listener:
        listener.bind(("localhost" if family == socket.AF_INET else "::1", 0))
        listener.listen()
        use = TritonUse(listener.getsockname()[1])
        assert not use.recent(), "it only listens"
        with socket.create_connection(listener.getsockname()[:2]):
            assert use.recent()
            listener.accept()[0].close()
            assert use.recent()
    assert use.recent(), "the server's end waits"


def test_a_connection_that_a_death_has_reset_counts_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        use = TritonUse(listener.getsockname()[1])
        client = socket.create_connection(listener.getsockname())
        use.look()
        accepted = listener.accept()[0]
        client.sendall(b"unread")
        accepted.close()  # so that it is a reset, as of a killed process
        client.close()
    assert use.recent()
    monkeypatch.setattr(triton_use, "_AFTER_S", 0)
    assert not use.recent()


def test_without_a_door_only_grpc_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRITON_USE_VARIABLE, raising=False)
    assert not TritonUse(*free_ports(1)).recent()


def test_where_nothing_is_known_nobody_is_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert TritonUseReport.made(tmp_path / "none" / "a.use") is None
    monkeypatch.setenv(TRITON_USE_VARIABLE, str(tmp_path / "none" / "a.use"))
    assert TritonUse(*free_ports(1)).recent()


def test_a_door_removes_what_killed_ones_left_and_nothing_else(tmp_path: Path) -> None:
    names = [f"cog_triton_{number}_use_{number:016x}" for number in range(4)]
    left, young, used, pipe = (tmp_path / name for name in names)
    owner = TritonUseReport(used)
    for path in (left, young):
        path.touch()
    os.mkfifo(pipe)  # of another user: opening it would block
    for path in (left, used):
        os.utime(path, (0, 0))
    TritonUseReport(tmp_path / "a.use")
    assert sorted(tmp_path.iterdir()) == sorted([young, used, pipe, tmp_path / "a.use"])
    del owner
    TritonUseReport(tmp_path / "b.use")
    assert not used.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", tmp_path], check=True)
    try:
        with suppress(OSError), (tmp_path / "filling").open("wb", buffering=0) as filling:
            while filling.write(bytes(4096)):
                pass
        assert TritonUseReport.made(tmp_path / "a.use") is None
        assert not (tmp_path / "a.use").exists()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_without_a_descriptor_left_to_look_with_nobody_is_blamed() -> None:
    """It ended the supervision, and with that the server."""
    use = TritonUse(*free_ports(1))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        use.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert use.recent()


def test_without_a_descriptor_left_memory_exceeds_no_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What holds much is not found until there is one; then a restart is due."""
    limit = MemoryLimit(1, Admission(1))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def due() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            return await limit._excess(os.getpid())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    assert asyncio.run(due()) == ""
    assert "memory is not known" in caplog.text
