"""The chart on a real Kubernetes, as a person would operate it: no stream is lost.

Then what breaks in a pod, and engines: the demo engine from an older chart, and a sealed one.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chart_rendering import CHART, ROOT
from kubectl import Kubectl
from release import NAME, Release, example
from sealed_engines import SealedBuilds, digest_of, unpacked
from stack import wait_until
from vllm_engines import double_environment

_DEPLOYMENT = f"deployment/{NAME}"
_KINDS = (
    "all,configmaps,secrets,persistentvolumeclaims,poddisruptionbudgets,ingresses,networkpolicies"
)
_WRITE = """
import pathlib
try:
    pathlib.Path("/x").touch()
except OSError as error:
    print(error.errno)
"""
_FIND = """
import os, pathlib, signal, time
def found(mark):
    for pid in sorted(int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")):
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if pid not in (1, os.getpid()) and mark in command:
            return pid
ENGINE = b"cog_triton.backend.engine_process"
SERVER = b"cog_triton.front.server"
"""
_STOP_UNTIL_REPLACED = f"""{_FIND}
server = found(SERVER)
os.kill(server, signal.SIGSTOP)
while found(SERVER) in (None, server):
    time.sleep(0.1)
"""
_KILL = f"{_FIND}os.kill(found(ENGINE), signal.SIGKILL)"
_OUT_OF_MEMORY = f"""{_FIND}
engine = found(ENGINE)
pathlib.Path(f"/proc/{{engine}}/oom_score_adj").write_text("1000")  # the kernel takes it first
hog = pathlib.Path("/dev/shm/hog")
with hog.open("wb", buffering=0) as file:
    try:
        for _ in range(4096):
            file.write(bytes(2**20))
            if not pathlib.Path(f"/proc/{{engine}}/exe").exists() or found(ENGINE) != engine:
                print("killed")
                break
    finally:
        hog.unlink()
"""
_FILL = """
with open("/opt/cog-triton/work/filler", "wb", buffering=0) as file:
    try:
        while file.write(bytes(2**16)):
            pass
    except OSError as error:
        print(error.errno)
"""
_EMPTY = "import os; os.unlink('/opt/cog-triton/work/filler')"
_OLD = "0.2.0"
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_both_apis_stream_through_the_service(release: Release) -> None:
    assert len(release.ready()) == 2
    with release.under_load() as clients:
        clients.wait(20)
    assert release.execute(release.ready()[0], _WRITE).strip() == "30"  # EROFS: a read-only root


def test_helm_test_gets_a_token(release: Release) -> None:
    """Of a cluster that has a DNS."""
    if not release.kubectl.objects("services", "-l", "k8s-app=kube-dns", "-A"):
        pytest.skip("this cluster has no DNS")
    assert "completion_tokens" in release.test()


def test_a_rollout_loses_nothing(release: Release) -> None:
    before = {*release.pods()}
    with release.under_load():
        release.kubectl("rollout", "restart", _DEPLOYMENT)
        release.kubectl("rollout", "status", _DEPLOYMENT, "--timeout=1200s")
    wait_until(release.all_ready, 600)
    assert before & {*release.pods()} == set()


def test_a_deleted_pod_drains(release: Release) -> None:
    with release.under_load():
        release.kubectl("delete", "pod", release.ready()[0], "--timeout=200s")
        wait_until(release.all_ready, 600)


def test_a_node_drains(release: Release) -> None:
    if len(release.kubectl.objects("nodes")) == 1:
        pytest.skip("this cluster has one node")
    node = release.pods()[release.ready()[0]]["spec"]["nodeName"]
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    with release.under_load():
        try:
            release.kubectl("drain", node, *options)
            wait_until(release.all_ready, 600)
        finally:
            release.kubectl("uncordon", node)


def test_an_upgrade_of_values_and_its_rollback_lose_nothing(release: Release) -> None:
    before = release.values
    with release.under_load() as clients:
        release.upgrade(settings={"MOCK_TPS": 50})
        clients.wait()
        release.rollback()
    release.values = before


def test_a_server_that_hangs_is_replaced_in_the_same_container(release: Release) -> None:
    first = release.ready()[0]
    before = release.restarts(first)
    with release.under_load(lost=4):  # those that ran there
        release.execute(first, _STOP_UNTIL_REPLACED)
        wait_until(release.all_ready, 600)
    assert release.restarts(first) == before


def test_an_engine_that_the_kernel_kills_for_want_of_memory_is_replaced(release: Release) -> None:
    first = release.ready()[0]
    before = release.restarts(first)
    with release.under_load(lost=4) as clients:
        assert "killed" in release.execute(first, _OUT_OF_MEMORY)
        clients.wait(16)
        wait_until(release.all_ready, 600)
    assert clients.lost == [] or release.restarts(first) > before


def test_the_key_of_a_secret_is_asked_for(release: Release) -> None:
    release.kubectl("create", "secret", "generic", "api", "--from-literal=api-key=k1")
    try:
        release.upgrade(auth={"existingSecret": "api"})
        url, right = f"http://{release.address}:8080/v1/models", {"authorization": "Bearer k1"}
        assert httpx.get(url, trust_env=False).status_code == 401
        assert httpx.get(url, headers=right, trust_env=False).status_code == 200
    finally:
        release.kubectl("delete", "secret", "api")


def test_uninstall_leaves_nothing(release: Release) -> None:
    release.uninstall()
    left = release.kubectl("get", _KINDS, "-o", "name").split()
    assert [name for name in left if NAME in name] == []


def test_streams_outlast_a_full_work_volume(
    this_machine: Path, kubectl: Kubectl, mock: dict[str, Any]
) -> None:
    place = this_machine / "small"
    place.mkdir()
    options = "size=64m,uid=1000,gid=1000"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    values = {**mock, "replicas": 1, "work": {"claim": "small"}}
    with (
        kubectl.claim("small", place),
        Release.installed(kubectl, values) as release,
        release.under_load() as clients,
    ):
        pod = release.ready()[0]
        assert release.execute(pod, _FILL).strip() == "28"  # ENOSPC
        clients.wait(16)
        release.execute(pod, _KILL)
        clients.wait(16)
        release.execute(pod, _EMPTY)
        assert release.restarts(pod) == 0


@pytest.fixture
def old_chart(tmp_path: Path) -> Path:
    """The chart of an earlier release, from this repository's history."""
    git = ["git", "-C", str(ROOT)]
    cut = [*git, "log", "-1", "--format=%H", f"--grep=^Cut {_OLD}$"]
    commit = subprocess.run(cut, capture_output=True, text=True, check=True).stdout.strip()
    if not commit:
        pytest.skip(f"{_OLD} is not in this clone")
    archive = [*git, "archive", commit, "deploy/helm"]
    files = subprocess.run(archive, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as opened:
        opened.extractall(tmp_path, filter="data")
    return tmp_path / "deploy" / "helm"


@pytest.fixture
def models(this_machine: Path, kubectl: Kubectl, engine_tar: Path) -> Iterator[str]:
    """A claim with the demo engine."""
    with kubectl.claim("models", engine_tar.parent) as name:
        yield name


def test_the_demo_engine_from_an_older_chart_to_this_one(
    models: str, old_chart: Path, kubectl: Kubectl, image: dict[str, str]
) -> None:
    slow = {"tritonStart": 600, "download": 120}
    resources = example("cpu-demo")["resources"]
    changed = {"image": image, "replicas": 2, "resources": resources, "timeouts": slow}
    values = {**example("cpu-demo", old_chart), **changed}
    with (
        Release.installed(kubectl, values, old_chart) as release,
        release.under_load(tokens=16, pause=1),
    ):
        release.values = {**example("cpu-demo", CHART), **changed}
        release.upgrade()
    assert models in kubectl.objects("persistentvolumeclaims")


def test_a_sealed_engine_serves_as_it_was_sealed(
    this_machine: Path, kubectl: Kubectl, image: dict[str, str]
) -> None:
    builds = SealedBuilds(this_machine / "sealed")
    (builds.directory / "model" / "chat_template.jinja").write_text(_TEMPLATE)
    engine = unpacked(builds.build(), this_machine / "sealed" / "engine")
    environment = double_environment(COG_TRITON_VLLM_PYTHON=str(builds.python))
    here = str(builds.directory)
    values = {
        "image": image,
        "gpus": 0,
        "replicas": 2,
        "model": {"claim": "sealed"},
        "settings": {
            "SEAL": "required",
            "SEAL_SHA256": f"sha256:{digest_of(engine)}",
            "CANARY": "require",
        },
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": {"cpu": "300m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        "extraVolumes": [{"name": "python", "hostPath": {"path": here}}],
        "extraVolumeMounts": [{"name": "python", "mountPath": here, "readOnly": True}],
    }
    with (
        kubectl.claim("sealed", engine),
        Release.installed(kubectl, values) as release,
        release.under_load(tokens=16),
    ):
        log = release.kubectl("logs", release.ready()[0])
    assert "was answered as built" in log, log
