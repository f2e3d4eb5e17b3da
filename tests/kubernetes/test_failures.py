"""What breaks in a pod, and who notices: the server itself, or Kubernetes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import volumes
from clients import Clients
from kubectl import Kubectl
from release import Release
from report import Report
from stack import wait_until

_FIND = """
import os, pathlib, signal
def found(mark):
    for pid in sorted(int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")):
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if pid not in (1, os.getpid()) and mark in command and b"reaper" not in command:
            return pid
"""
_ENGINE = b"cog_triton.backend.engine_process"
_STOP = _FIND + "os.kill(found(%r), signal.SIGSTOP)"
_KILL = _FIND + "os.kill(found(%r), signal.SIGKILL)"
_OUT_OF_MEMORY = (
    _FIND
    + """
engine = found(%r)
pathlib.Path(f"/proc/{engine}/oom_score_adj").write_text("1000")  # the kernel takes it first
hog = pathlib.Path("/dev/shm/hog")
with hog.open("wb", buffering=0) as file:
    try:
        for _ in range(4096):
            file.write(bytes(2**20))
            if not pathlib.Path(f"/proc/{engine}/exe").exists() or found(%r) != engine:
                print("killed")
                break
    finally:
        hog.unlink()
"""
)
_FILL = """
import os
with open("/opt/cog-triton/work/filler", "wb", buffering=0) as file:
    try:
        while file.write(bytes(2**16)):
            pass
    except OSError as error:
        print(error.errno)
"""
_WRITE_TOO_MUCH = """
with open("/opt/cog-triton/work/filler", "wb") as file:
    file.write(bytes(200 * 2**20))
"""
_EMPTY = "import os; os.unlink('/opt/cog-triton/work/filler')"


def test_a_door_that_hangs_is_replaced(release: Release, report: Report) -> None:
    first = release.ready()[0]
    with (
        Clients(release.address) as clients,
        report.operation("front door stopped (SIGSTOP)", clients) as row,
    ):
        clients.wait()
        release.execute(first, _STOP % b"cog_triton.door")
        wait_until(lambda: release.restarts(first) > 0, 120)
        wait_until(release.all_ready, 600)
        clients.wait()
        row.seen = "the liveness probe has its container replaced"
    assert len(clients.lost) <= 4, clients.lost  # those that ran there


def test_a_worker_that_hangs_is_replaced_by_the_server_itself(
    release: Release, report: Report
) -> None:
    first = release.ready()[0]
    before = release.restarts(first)
    with (
        Clients(release.address) as clients,
        report.operation("Cog's worker stopped (SIGSTOP)", clients) as row,
    ):
        clients.wait()
        release.execute(first, _STOP % b"coglet")
        wait_until(lambda: not release.all_ready(), 120)
        wait_until(release.all_ready, 600)
        clients.wait()
        row.seen = f"ready again; containers made anew: {release.restarts(first) - before}"
    assert release.restarts(first) - before <= 1
    assert len(clients.lost) <= 4, clients.lost


def test_an_engine_for_want_of_memory(release: Release, report: Report) -> None:
    first = release.ready()[0]
    before = release.restarts(first)
    with (
        Clients(release.address) as clients,
        report.operation("the kernel kills the engine for want of memory", clients) as row,
    ):
        clients.wait()
        assert "killed" in release.execute(first, _OUT_OF_MEMORY % (_ENGINE, _ENGINE))
        clients.wait(16)
        wait_until(release.all_ready, 600)
        anew = release.restarts(first) - before
        row.seen = f"the server starts another; containers made anew: {anew}"
    assert clients.lost == [] if anew == 0 else len(clients.lost) <= 4, clients.lost


@pytest.fixture
def small_volume(this_machine: Path, kubectl: Kubectl) -> Iterator[str]:
    """A claim of 64 MiB."""
    place = this_machine / "small"
    place.mkdir()
    options = "size=64m,uid=1000,gid=1000"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    volumes.claim(kubectl, "small", place)
    try:
        yield "small"
    finally:
        volumes.drop(kubectl, "small")


def test_a_full_work_volume(
    small_volume: str, kubectl: Kubectl, mock: dict[str, Any], report: Report
) -> None:
    values = {**mock, "replicas": 1, "work": {"claim": small_volume}}
    with (
        Release.installed(kubectl, values) as release,
        Clients(release.address) as clients,
        report.operation("work volume full, then the engine killed", clients) as row,
    ):
        pod = release.ready()[0]
        clients.wait()
        assert release.execute(pod, _FILL).strip() == "28"  # ENOSPC
        clients.wait(16)
        release.execute(pod, _KILL % _ENGINE)
        clients.wait(16)
        release.execute(pod, _EMPTY)
        clients.wait()
        row.seen = f"streams go on; containers made anew: {release.restarts(pod)}"
        assert release.restarts(pod) == 0
    assert clients.lost == []
    assert small_volume in kubectl.objects("persistentvolumeclaims")


def test_more_than_the_work_volumes_size(
    kubectl: Kubectl, mock: dict[str, Any], report: Report
) -> None:
    with (
        Release.installed(kubectl, {**mock, "work": {"size": "64Mi"}}) as release,
        Clients(release.address) as clients,
        report.operation("more written than `work.size`", clients) as row,
    ):
        first = release.ready()[0]
        clients.wait()
        release.execute(first, _WRITE_TOO_MUCH)
        wait_until(lambda: first not in release.ready(), 120)
        wait_until(lambda: len(release.ready()) == 2, 600)
        clients.wait()
        reason = release.pods().get(first, {}).get("status", {}).get("reason")
        row.seen = f"{reason}, and another server"
    assert len(clients.lost) <= 4, clients.lost
