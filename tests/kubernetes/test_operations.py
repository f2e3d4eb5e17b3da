"""The chart on a real Kubernetes, as a person would operate it: no stream is lost."""

from __future__ import annotations

import time

import httpx
from release import Clients, Release
from stack import wait_until

_STOP = """
import os, signal, pathlib
for pid in sorted(int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")):
    command = pathlib.Path(f"/proc/{{pid}}/cmdline").read_bytes()
    if pid not in (1, os.getpid()) and {mark!r} in command:
        os.kill(pid, signal.SIGSTOP)
        print(pid)
        break
"""


_WRITE = """
import pathlib
try:
    pathlib.Path("/x").touch()
except OSError as error:
    print(error.errno)
"""


def test_both_apis_stream_through_the_service(release: Release) -> None:
    assert release.ready() == 2
    with Clients(release.address) as clients:
        clients.wait()
    assert clients.lost == []


def test_a_rollout_loses_nothing(release: Release) -> None:
    before = {*release.pods()}
    with Clients(release.address) as clients:
        clients.wait()
        release.kubectl("rollout", "restart", "deployment/cog-triton")
        release.kubectl("rollout", "status", "deployment/cog-triton", "--timeout=400s")
        clients.wait()
    assert clients.lost == []
    wait_until(lambda: len(release.pods()) == 2)
    assert not before & {*release.pods()}


def test_a_deleted_pod_drains(release: Release) -> None:
    first = next(iter(release.pods()))
    with Clients(release.address) as clients:
        clients.wait()
        release.kubectl("delete", "pod", first, "--timeout=200s")
        clients.wait()
    assert clients.lost == []
    wait_until(lambda: release.ready() == 2, 300)


def test_a_node_drains(release: Release) -> None:
    node = next(iter(release.pods().values()))["spec"]["nodeName"]
    with Clients(release.address) as clients:
        clients.wait()
        try:
            release.kubectl(
                "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s"
            )
            clients.wait()
        finally:
            release.kubectl("uncordon", node)
    assert clients.lost == []
    wait_until(lambda: release.ready() == 2, 300)


def restarts(release: Release, pod: str) -> int:
    """How often the container was made anew."""
    count: int = release.pods()[pod]["status"]["containerStatuses"][0]["restartCount"]
    return count


def test_a_door_that_hangs_is_replaced(release: Release) -> None:
    first = next(iter(release.pods()))
    assert release.execute(first, _STOP.format(mark=b"cog_triton.door")).strip()
    wait_until(lambda: restarts(release, first) == 1, 120)
    wait_until(lambda: release.ready() == 2, 300)


def test_a_worker_that_hangs_is_replaced_by_the_server_itself(release: Release) -> None:
    first = next(iter(release.pods()))
    before = restarts(release, first)
    assert release.execute(first, _STOP.format(mark=b"coglet")).strip()
    wait_until(lambda: release.ready() < 2, 120)
    wait_until(lambda: release.ready() == 2, 300)
    with Clients(release.address) as clients:
        clients.wait()
    assert clients.lost == []
    assert restarts(release, first) - before <= 1


def test_the_root_is_read_only_and_the_log_is_quiet(release: Release) -> None:
    first = next(iter(release.pods()))
    assert release.execute(first, _WRITE).strip() == "30"  # EROFS
    since = time.time()
    time.sleep(20)  # of silence
    log = release.kubectl("logs", first, f"--since={int(time.time() - since)}s")
    assert len(log.splitlines()) <= 2, log


def test_an_upgrade_changes_pods_in_place(release: Release) -> None:
    with Clients(release.address) as clients:
        clients.wait()
        release.apply(settings={"MOCK_TPS": 50})
        clients.wait()
    assert clients.lost == []


def test_the_key_of_a_secret_opens_the_door(release: Release) -> None:
    release.kubectl("create", "secret", "generic", "cog-triton", "--from-literal=api-key=k1")
    try:
        release.apply(auth={"existingSecret": "cog-triton"}, replicas=1)
        url = f"http://{release.address}:8080/v1/models"
        assert httpx.get(url, trust_env=False).status_code == 401
        right = {"authorization": "Bearer k1"}
        assert httpx.get(url, headers=right, trust_env=False).status_code == 200
    finally:
        release.kubectl("delete", "secret", "cog-triton")


def test_uninstall_leaves_nothing(release: Release) -> None:
    made = release.kinds()
    release.delete()
    for kind, name in made:
        assert not release.kubectl("get", kind, name, "--ignore-not-found")
