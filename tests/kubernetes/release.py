"""A release of the chart in a cluster, and streams of its clients."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from chart_rendering import SCRIPT
from stack import wait_until

NAMESPACE = "default"
_PODS = "app.kubernetes.io/instance=cog-triton,app.kubernetes.io/component=server"
_CHAT = {
    "model": "cog-triton",
    "messages": [{"role": "user", "content": "Hi there."}],
    "max_tokens": 60,
    "stream": True,
}
_PREDICTION = {"input": {"prompt": "Hi there.", "max_tokens": 60}}


class Release:
    """The release "cog-triton"; `url` are its Service's ports from where the tests run."""

    def __init__(self, kubeconfig: Path, values: Mapping[str, Any], binaries: str | None) -> None:
        self._kubeconfig = kubeconfig
        path = f"{binaries or ''}:{os.environ['PATH']}"
        self._kubectl = shutil.which("kubectl", path=path) or "kubectl"
        self.values = values

    @classmethod
    @contextmanager
    def installed(
        cls, kubeconfig: Path, values: Mapping[str, Any], binaries: str | None
    ) -> Iterator[Release]:
        """The chart with these values, ready, until the block ends."""
        release = cls(kubeconfig, values, binaries)
        try:
            release.apply()
            yield release
        finally:
            release.delete()

    def manifests(self) -> str:
        """What Helm renders."""
        return "---\n".join(SCRIPT["documents"](SCRIPT["render"](self.values)))

    def apply(self, **changed: Any) -> None:
        """Install or upgrade, and wait until all pods are ready."""
        self.values = {**self.values, **changed}
        self.kubectl("apply", "-f", "-", given=self.manifests())
        self.kubectl("rollout", "status", "deployment/cog-triton", "--timeout=400s")

    def delete(self) -> None:
        """Uninstall, and wait until it is gone."""
        self.kubectl(
            "delete", "-f", "-", "--ignore-not-found", "--timeout=200s", given=self.manifests()
        )
        wait_until(lambda: not self.pods())

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """What kubectl prints."""
        command = [self._kubectl, f"--kubeconfig={self._kubeconfig}", "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def pods(self) -> dict[str, dict[str, Any]]:
        """The servers' pods by name."""
        listed = json.loads(self.kubectl("get", "pods", "-l", _PODS, "-o", "json"))
        return {item["metadata"]["name"]: item for item in listed["items"]}

    def ready(self) -> int:
        """How many pods are ready."""
        return sum(
            condition["type"] == "Ready" and condition["status"] == "True"
            for pod in self.pods().values()
            for condition in pod["status"].get("conditions", ())
            if "deletionTimestamp" not in pod["metadata"]
        )

    @property
    def address(self) -> str:
        """The Service's address in the cluster."""
        service = json.loads(self.kubectl("get", "service", "cog-triton", "-o", "json"))
        address: str = service["spec"]["clusterIP"]
        return address

    def execute(self, pod: str, script: str) -> str:
        """What a Python script in a pod's container prints."""
        return self.kubectl("exec", pod, "--", "python", "-c", script)

    def kinds(self) -> set[tuple[str, str]]:
        """Kinds and names of what it is made of."""
        found = [one for one in yaml.safe_load_all(self.manifests()) if one]
        return {(one["kind"], one["metadata"]["name"]) for one in found}


class Clients:
    """Streams of both APIs, one after the other, over connections that are kept."""

    def __init__(self, address: str, count: int = 4) -> None:
        self.whole = 0
        self.lost: list[str] = []
        self._end = threading.Event()
        self._address = address
        kinds = [self._chat, self._predict] * (count // 2)
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Clients:
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
        wait_until(lambda: self.whole >= wanted)

    def _run(self, kind: Any) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._end.is_set():
                try:
                    kind(client)
                    self.whole += 1
                except (httpx.HTTPError, AssertionError) as error:
                    self.lost.append(f"{time.strftime('%X')} {error!r}")

    def _chat(self, client: httpx.Client) -> None:
        url = f"http://{self._address}:8080/v1/chat/completions"
        with client.stream("POST", url, json=_CHAT) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-3:]

    def _predict(self, client: httpx.Client) -> None:
        url = f"http://{self._address}:5000/predictions"
        headers = {"accept": "text/event-stream"}
        with client.stream("POST", url, json=_PREDICTION, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            text = "".join(answer.iter_text())
        assert "event: completed" in text, text[-300:]
