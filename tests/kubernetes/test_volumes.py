"""A work volume that is full, and one that is larger than it may be."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import Clients
from kubectl import Kubectl, Report
from release import Release
from stack import wait_until
from test_failures import ENGINE, FIND

_KILL = FIND + "os.kill(found(%r), signal.SIGKILL)"
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


@pytest.fixture
def small_volume(this_machine: Path, kubectl: Kubectl) -> Iterator[str]:
    """A claim of 64 MiB."""
    place = this_machine / "small"
    place.mkdir()
    options = "size=64m,uid=1000,gid=1000"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    with kubectl.claim("small", place) as name:
        yield name


def test_a_full_work_volume(
    small_volume: str, kubectl: Kubectl, mock: dict[str, Any], report: Report
) -> None:
    values = {**mock, "replicas": 1, "work": {"claim": small_volume}}
    with (
        Release.installed(kubectl, values) as release,
        release.under_load(report, "work volume full, then the engine killed") as (clients, row),
    ):
        pod = release.ready()[0]
        assert release.execute(pod, _FILL).strip() == "28"  # ENOSPC
        clients.wait(16)
        release.execute(pod, _KILL % ENGINE)
        clients.wait(16)
        release.execute(pod, _EMPTY)
        row.append(f"streams go on; containers made anew: {release.restarts(pod)}")
        assert release.restarts(pod) == 0
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
        row.append(f"{reason} without a drain, and another server")
        here = len(clients.lost)
        clients.wait()
    assert clients.lost[here:] == []
