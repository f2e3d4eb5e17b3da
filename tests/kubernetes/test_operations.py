"""The chart on a real Kubernetes, as a person would operate it: no stream is lost."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from kubectl import Report
from release import NAME, Release
from stack import wait_until

_DEPLOYMENT = f"deployment/{NAME}"
_WRITE = """
import pathlib
try:
    pathlib.Path("/x").touch()
except OSError as error:
    print(error.errno)
"""
_CONNECT = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[3])
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    except OSError:
        if time.monotonic() > end:
            raise
        time.sleep(0.5)
    else:
        break
"""
_KINDS = (
    "all,configmaps,secrets,persistentvolumeclaims,poddisruptionbudgets,ingresses,networkpolicies"
)


def test_both_apis_stream_through_the_service(release: Release, report: Report) -> None:
    assert len(release.ready()) == 2
    with release.under_load(report, "streams through the Service, two servers") as (clients, row):
        clients.wait(20)
        row.append("all whole")


def test_helm_test_gets_a_token(release: Release, report: Report) -> None:
    """Of a cluster that has a DNS."""
    if not release.kubectl.objects("services", "-l", "k8s-app=kube-dns", "-A"):
        pytest.skip("this cluster has no DNS")
    with report.operation("`helm test`") as row:
        assert "completion_tokens" in release.test()
        row.append("one token, by the Service's name")


def test_a_rollout_loses_nothing(release: Release, report: Report) -> None:
    before = {*release.pods()}
    with release.under_load(report, "`kubectl rollout restart`") as (_, row):
        release.kubectl("rollout", "restart", _DEPLOYMENT)
        release.kubectl("rollout", "status", _DEPLOYMENT, "--timeout=1200s")
        row.append("one server at a time")
    wait_until(release.all_ready, 600)
    assert not before & {*release.pods()}


def test_a_deleted_pod_drains(release: Release, report: Report) -> None:
    with release.under_load(report, "`kubectl delete pod`") as (_, row):
        begun = time.monotonic()
        release.kubectl("delete", "pod", release.ready()[0], "--timeout=200s")
        gone = time.monotonic() - begun
        wait_until(release.all_ready, 600)
        row.append(f"drained and gone after {gone:.0f} s, its successor ready")


def test_a_node_drains(release: Release, report: Report) -> None:
    if len(release.kubectl.objects("nodes")) == 1:
        pytest.skip("this cluster has one node")
    node = release.pods()[release.ready()[0]]["spec"]["nodeName"]
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    with release.under_load(report, "`kubectl drain`") as (_, row):
        try:
            release.kubectl("drain", node, *options)
            wait_until(release.all_ready, 600)
        finally:
            release.kubectl("uncordon", node)
        row.append("both servers on the other node")


def test_the_root_is_read_only_and_the_log_is_quiet(release: Release, report: Report) -> None:
    first = release.ready()[0]
    assert release.execute(first, _WRITE).strip() == "30"  # EROFS
    with report.operation("a minute without requests, read-only root") as row:
        time.sleep(60)
        log = release.kubectl("logs", first, "--since=60s")
        row.append(f"a write gets EROFS; {len(log.splitlines())} log lines a minute")
    assert len(log.splitlines()) <= 2, log


def test_an_upgrade_of_values_and_its_rollback(release: Release, report: Report) -> None:
    name = "`helm upgrade` of a setting, `helm rollback`"
    with release.under_load(report, name) as (clients, row):
        before = release.values
        release.upgrade(settings={"MOCK_TPS": 50})
        clients.wait()
        release.rollback()
        release.values = before
        row.append("new servers twice")


def test_the_network_policy_admits_whom_it_names(release: Release, report: Report) -> None:
    """Skipped, by its name, where the network does not enforce policies."""
    before = release.values
    named = {"podSelector": {"matchLabels": {"may": "ask"}}}
    release.upgrade(networkPolicy={"enabled": True, "from": [named]})
    address = release.pods()[release.ready()[0]]["status"]["podIP"]
    try:
        with report.operation("NetworkPolicy, another pod connects") as row:
            # The network takes a while to hear of a policy, and of a pod.
            assert _connects(release, "named", address, labels="may=ask", within=60)
            enforced = not _connects(release, "other", address, labels="may=not", within=10)
            other = "refused" if enforced else "accepted, and not enforced by this network"
            row.append(f"{other}; the pod that it names connects")
    finally:
        release.values = before
        release.upgrade()
    if not enforced:
        pytest.skip("this cluster's network does not enforce NetworkPolicy")


def _connects(release: Release, pod: str, address: str, *, labels: str, within: int) -> bool:
    image = release.values["image"]
    reference = f"--image={image['repository']}:{image['tag']}"
    begin = ("run", pod, "--restart=Never", f"--labels={labels}", reference, "--command", "--")
    release.kubectl(*begin, "python", "-c", _CONNECT, address, "8080", str(within))
    try:
        phase = wait_until(lambda: _ended(release.kubectl.objects("pods")[pod]))
        return bool(phase == "Succeeded")
    finally:
        release.kubectl("delete", "pod", pod, "--now")


def _ended(pod: dict[str, Any]) -> str | None:
    phase: str = pod["status"]["phase"]
    return phase if phase in ("Succeeded", "Failed") else None


def test_the_key_of_a_secret_opens_the_door(release: Release, report: Report) -> None:
    release.kubectl("create", "secret", "generic", "api", "--from-literal=api-key=k1")
    try:
        release.upgrade(auth={"existingSecret": "api"})
        url = f"http://{release.address}:8080/v1/models"
        with report.operation("a key from a Secret") as row:
            assert httpx.get(url, trust_env=False).status_code == 401
            right = {"authorization": "Bearer k1"}
            assert httpx.get(url, headers=right, trust_env=False).status_code == 200
            row.append("401 without it, 200 with it")
    finally:
        release.kubectl("delete", "secret", "api")


def test_uninstall_leaves_nothing(release: Release, report: Report) -> None:
    with report.operation("`helm uninstall`") as row:
        release.uninstall()
        left = release.kubectl("get", _KINDS, "-o", "name").split()
        row.append("nothing is left")
    assert [name for name in left if NAME in name] == []
