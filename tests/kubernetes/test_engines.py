"""Engines in a cluster: the demo engine, from an older chart to this one, and a sealed one."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_rendering import CHART, ROOT
from kubectl import Kubectl, Report
from release import Release, example
from sealed_engines import SealedBuilds, digest_of, unpacked
from vllm_engines import double_environment

_OLD = "0.2.0"
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def models(this_machine: Path, kubectl: Kubectl, engine_tar: Path) -> Iterator[str]:
    """A claim with the demo engine."""
    with kubectl.claim("models", engine_tar.parent) as name:
        yield name


@pytest.fixture
def old_chart(tmp_path: Path) -> Path:
    """The chart of an earlier release, from this repository's history."""
    git = ["git", "-C", str(ROOT)]
    cut = [*git, "log", "-1", "--format=%H", f"--grep=^Cut {_OLD}$"]
    commit = subprocess.run(cut, capture_output=True, text=True, check=True).stdout.strip()
    if not commit:
        pytest.skip(f"{_OLD} is not in this clone")
    files = subprocess.run(
        [*git, "archive", commit, "deploy/helm"], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "deploy" / "helm"


def test_the_demo_engine_from_an_older_chart_to_this_one(
    models: str, old_chart: Path, kubectl: Kubectl, image: dict[str, str], report: Report
) -> None:
    resources = example("cpu-demo")["resources"]
    slow = {"tritonStart": 600, "download": 120}
    changed = {"image": image, "replicas": 2, "resources": resources, "timeouts": slow}
    values = {**example("cpu-demo", old_chart), **changed}
    name = f"`helm upgrade` from {_OLD}'s chart, demo engine"
    with (
        Release.installed(kubectl, values, old_chart) as release,
        release.under_load(report, name, tokens=16, pause=1) as (_, row),
    ):
        release.values = {**example("cpu-demo", CHART), **changed}
        release.upgrade()
        row.append("new servers, of a read-only claim")
    assert models in kubectl.objects("persistentvolumeclaims")


def test_a_sealed_engine_serves_as_it_was_sealed(
    this_machine: Path, kubectl: Kubectl, image: dict[str, str], report: Report
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
        release.under_load(report, "a sealed engine of vLLM's double", tokens=16) as (_, row),
    ):
        log = release.kubectl("logs", release.ready()[0])
        row.append("its canary answered as built, streams")
    assert "was answered as built" in log, log
