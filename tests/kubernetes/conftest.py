"""A cluster for these tests: that of KUBECONFIG, or of the binaries in KUBE_BIN; else none run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

_ROOT = Path(__file__).parents[2]
_TESTS = _ROOT / "tests"
KUBECONFIG, KUBE_BIN = os.environ.get("KUBECONFIG"), os.environ.get("KUBE_BIN")
"""Before other tests' conftest clears the environment."""
IMAGE = os.environ.get("IMAGE")
sys.path[:0] = [str(_TESTS), str(_TESTS / "deploy"), str(_ROOT / ".work" / "deploy")]

import stand_in_image  # noqa: E402
from cluster import Cluster, lacking  # noqa: E402
from release import Release  # noqa: E402


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if KUBECONFIG:
        yield Path(KUBECONFIG)
        return
    if not KUBE_BIN:
        pytest.skip("no cluster: KUBECONFIG=FILE, or KUBE_BIN=DIR with Kubernetes' binaries")
    if missing := lacking(Path(KUBE_BIN)):
        pytest.skip(f"neither KUBE_BIN={KUBE_BIN} nor PATH has {', '.join(missing)}")
    directory = tmp_path_factory.mktemp("kubernetes")
    archive = stand_in_image.write(directory / "images.tar")
    with Cluster.running(directory, Path(KUBE_BIN), archive) as cluster:
        yield cluster.kubeconfig


@pytest.fixture(scope="session")
def values() -> dict[str, object]:
    """The mock engine: of the checkout in a cluster of ours, of IMAGE elsewhere."""
    example = _ROOT / "deploy" / "helm" / "examples" / "mock.yaml"
    made: dict[str, object] = yaml.safe_load(example.read_text())
    repository, _, tag = (IMAGE or stand_in_image.IMAGE).rpartition(":")
    own = {} if IMAGE or KUBECONFIG else stand_in_image.mounts()
    off = {"ingress": {"enabled": False}, "test": {"enabled": False}}
    image = {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}
    return {**made, **off, **own, "image": image, "replicas": 2}


@pytest.fixture(scope="module")
def release(kubeconfig: Path, values: dict[str, object]) -> Iterator[Release]:
    with Release.installed(kubeconfig, values, KUBE_BIN) as made:
        yield made
