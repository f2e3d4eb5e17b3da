"""A release of the chart in a cluster, by Helm."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from chart_rendering import CHART
from clients import Clients
from kubectl import NAMESPACE, Kubectl, Report
from stack import wait_until

NAME = "cog-triton"
_PODS = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=server"
_TIMEOUT_S = 1200


class Release:
    """The release "cog-triton": Helm's library does what its command line does."""

    def __init__(self, kubectl: Kubectl, values: Mapping[str, Any]) -> None:
        from helm_python import Config

        self.kubectl = kubectl
        self.values = values
        self._helm = Config(kubeconfig_path=kubectl.config, namespace=NAMESPACE)

    @classmethod
    @contextmanager
    def installed(
        cls, kubectl: Kubectl, values: Mapping[str, Any], chart: Path = CHART
    ) -> Iterator[Release]:
        """``helm install --wait`` with these values, until the block ends."""
        release = cls(kubectl, values)
        try:
            release._helm.install(
                chart, NAME, dict(values), wait="watcher", timeout=_TIMEOUT_S, namespace=NAMESPACE
            )
            yield release
        finally:
            release.uninstall()
            release._helm.close()

    def upgrade(self, chart: Path = CHART, **changed: Any) -> None:
        """``helm upgrade --wait``, with changed values."""
        self.values = {**self.values, **changed}
        self._helm.upgrade(
            chart, NAME, dict(self.values), wait="watcher", timeout=_TIMEOUT_S, namespace=NAMESPACE
        )

    def rollback(self) -> None:
        """``helm rollback --wait`` to the previous revision."""
        self._helm.rollback(NAME, wait="watcher", timeout=_TIMEOUT_S)

    def uninstall(self) -> None:
        """``helm uninstall``, until the pods are gone, too."""
        self._helm.uninstall(NAME, ignore_not_found=True, wait="watcher", timeout=_TIMEOUT_S)
        wait_until(lambda: not self.pods())

    def test(self) -> str:
        """``helm test``: what its pod prints."""
        logs: str = self._helm.test(NAME, timeout=_TIMEOUT_S, logs=True)["logs"]
        return logs

    def pods(self) -> dict[str, dict[str, Any]]:
        """The servers' pods by name."""
        return self.kubectl.objects("pods", "-l", _PODS)

    def ready(self) -> list[str]:
        """Names of the pods that are ready, and are not about to end."""
        return [
            name
            for name, pod in self.pods().items()
            if "deletionTimestamp" not in pod["metadata"]
            for condition in pod["status"].get("conditions", ())
            if condition["type"] == "Ready" and condition["status"] == "True"
        ]

    def all_ready(self) -> bool:
        """Whether there are as many as there should be, and no others."""
        return len(self.ready()) == len(self.pods()) == self.values["replicas"]

    def restarts(self, pod: str) -> int:
        """How often a pod's container was made anew."""
        statuses = self.pods()[pod]["status"].get("containerStatuses", ())
        return sum(one["restartCount"] for one in statuses)

    @property
    def address(self) -> str:
        """The Service's address in the cluster."""
        address: str = json.loads(self.kubectl("get", "service", NAME, "-o", "json"))["spec"][
            "clusterIP"
        ]
        return address

    def execute(self, pod: str, script: str) -> str:
        """What a Python script in a pod's container prints."""
        return self.kubectl("exec", pod, "-c", NAME, "--", "python", "-c", script)

    @contextmanager
    def under_load(
        self, report: Report, name: str, **load: Any
    ) -> Iterator[tuple[Clients, list[str]]]:
        """Clients' streams around an operation, whose row is of the report; none is lost."""
        with Clients(self.address, **load) as clients, report.operation(name, clients) as row:
            clients.wait()
            yield clients, row
            clients.wait()
        assert clients.lost == []


def example(name: str, chart: Path = CHART) -> dict[str, Any]:
    """The values of one of the chart's examples."""
    read: dict[str, Any] = yaml.safe_load((chart / "examples" / f"{name}.yaml").read_text())
    return read
