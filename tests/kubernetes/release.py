"""A release of the chart in a cluster, by Helm, and streams of its clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from chart_rendering import CHART
from kubectl import NAMESPACE, Kubectl
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
    def under_load(self, lost: int = 0, **load: Any) -> Iterator[Clients]:
        """Clients' streams around an operation, which may lose so many of them."""
        with Clients(self.address, **load) as clients:
            clients.wait()
            yield clients
            clients.wait()
        assert len(clients.lost) <= lost, clients.lost


class Clients:
    """Streams of both APIs, one after the other, over connections that are kept."""

    def __init__(self, address: str, *, tokens: int = 60, pause: float = 0) -> None:
        """`pause` is the seconds between a client's streams, for engines that compute."""
        self.whole = 0
        self.lost: list[str] = []
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._address, self._tokens, self._pause = address, tokens, pause
        models = httpx.get(f"http://{address}:8080/v1/models", trust_env=False)
        self._model = models.raise_for_status().json()["data"][0]["id"]
        kinds = 2 * [self._chat, self._predict]
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def wait(self, more: int = 8) -> None:
        """Until so many more streams are whole."""
        wanted = self.whole + more
        wait_until(lambda: self.whole >= wanted, 600)

    def _run(self, kind: Any) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._end.is_set():
                try:
                    kind(client)
                except (httpx.HTTPError, AssertionError) as error:
                    with self._lock:
                        self.lost.append(f"{time.strftime('%X')} {kind.__name__} {error!r}")
                    self._end.wait(0.5)
                    continue
                with self._lock:
                    self.whole += 1
                self._end.wait(self._pause)

    def _stream(self, client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
        headers = {"accept": "text/event-stream"}
        url = f"http://{self._address}:{path}"
        with client.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            return [line for line in answer.iter_lines() if line]

    def _chat(self, client: httpx.Client) -> None:
        messages = [{"role": "user", "content": "Hi there."}]
        body = {"model": self._model, "messages": messages, "max_tokens": self._tokens}
        lines = self._stream(client, "8080/v1/chat/completions", {**body, "stream": True})
        assert lines[-1] == "data: [DONE]", lines[-3:]
        assert "error" not in lines[-2], lines[-3:]

    def _predict(self, client: httpx.Client) -> None:
        body = {"input": {"prompt": "Hi there.", "max_tokens": self._tokens}}
        lines = self._stream(client, "5000/predictions", body)
        assert '"status":"succeeded"' in lines[-1].replace('": "', '":"'), lines[-3:]


def example(name: str, chart: Path = CHART) -> dict[str, Any]:
    """The values of one of the chart's examples."""
    read: dict[str, Any] = yaml.safe_load((chart / "examples" / f"{name}.yaml").read_text())
    return read
