"""A cluster for these tests: that of KUBECONFIG, or of the binaries in KUBE_BIN; else none run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_TESTS = _ROOT / "tests"
KUBECONFIG, KUBE_BIN = os.environ.get("KUBECONFIG"), os.environ.get("KUBE_BIN")
"""Before other tests' conftest clears the environment."""
IMAGE = os.environ.get("IMAGE")
sys.path[:0] = [str(_TESTS), str(_TESTS / "deploy"), str(_ROOT / ".work" / "tools")]

import stand_in_image  # noqa: E402
from cluster import Cluster, lacking  # noqa: E402
from engine_fixtures import engine_tar  # noqa: E402, F401
from kubectl import Kubectl  # noqa: E402
from release import Release, example  # noqa: E402


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """kubectl for the cluster."""
    if KUBECONFIG:
        yield Kubectl(Path(KUBECONFIG))
        return
    if not KUBE_BIN:
        pytest.skip("no cluster: KUBECONFIG=FILE, or KUBE_BIN=DIR with Kubernetes' binaries")
    if missing := lacking(Path(KUBE_BIN)):
        pytest.skip(f"neither KUBE_BIN={KUBE_BIN} nor PATH has {', '.join(missing)}")
    directory = tmp_path_factory.mktemp("kubernetes")
    archive = stand_in_image.write(directory / "images.tar")
    with Cluster.running(directory, Path(KUBE_BIN), archive) as cluster:
        yield cluster.kubectl


@pytest.fixture(scope="session")
def image() -> dict[str, str]:
    """Values of the image: of the checkout in a cluster of ours, IMAGE elsewhere."""
    if KUBECONFIG and not IMAGE:
        pytest.skip("IMAGE=REPOSITORY:TAG: a CPU image that the cluster can pull")
    repository, _, tag = (IMAGE or stand_in_image.IMAGE).rpartition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}


@pytest.fixture(scope="session")
def this_machine(kubectl: Kubectl) -> Path:
    """Where nodes have this machine's files: in a cluster of ours."""
    if KUBECONFIG:
        pytest.skip("a cluster of KUBECONFIG does not see this machine's files")
    return kubectl.config.parent


@pytest.fixture(scope="session")
def mock(image: dict[str, str]) -> dict[str, Any]:
    """Values of two servers of the mock engine, by its example, on a machine that may be slow."""
    slow = {"timeouts": {"tritonStart": 600, "download": 0}}
    # /dev/shm can reach the limit of memory; what is asked for lowers the others' oom_score_adj.
    resources = {"requests": {"cpu": "300m", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}
    memory = {"resources": resources, "shm": {"size": "4Gi"}}
    return {**example("mock"), **slow, **memory, "image": image, "replicas": 2}


@pytest.fixture(scope="module")
def release(kubectl: Kubectl, mock: dict[str, Any]) -> Iterator[Release]:
    """Two servers of the mock engine."""
    with Release.installed(kubectl, mock) as made:
        yield made
