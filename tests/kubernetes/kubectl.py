"""kubectl for a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMESPACE = "default"


class Kubectl:
    """kubectl of the user's directory, else of PATH, with a kubeconfig."""

    def __init__(self, config: Path, binaries: Path | None = None) -> None:
        self.config = config
        program = shutil.which("kubectl", path=f"{binaries or ''}:{os.environ['PATH']}")
        self._command = [program or "kubectl", f"--kubeconfig={config}", "-n", NAMESPACE]

    def __call__(self, *arguments: str, given: str | None = None) -> str:
        """What it prints."""
        done = self._run(arguments, given)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def succeeds(self, *arguments: str) -> bool:
        """Whether it exits with 0."""
        return self._run(arguments, None).returncode == 0

    def objects(self, kind: str, *arguments: str) -> dict[str, dict[str, Any]]:
        """Objects of a kind by their names."""
        listed = json.loads(self("get", kind, *arguments, "-o", "json"))
        return {item["metadata"]["name"]: item for item in listed["items"]}

    @contextmanager
    def claim(self, name: str, directory: Path) -> Iterator[str]:
        """A PersistentVolumeClaim of this machine's directory, for the block."""
        size = {"storage": "1Gi"}
        spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {"capacity": size, "hostPath": {"path": str(directory)}}
        volume["claimRef"] = {"namespace": NAMESPACE, "name": name}
        claim = {"resources": {"requests": size}, "volumeName": name}
        items = [
            {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": {**spec, **own}}
            for kind, own in (("PersistentVolume", volume), ("PersistentVolumeClaim", claim))
        ]
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self("apply", "-f", "-", given=given)
        try:
            yield name
        finally:
            self("delete", f"persistentvolumeclaim/{name}", f"persistentvolume/{name}")

    def _run(self, arguments: tuple[str, ...], given: str | None) -> Any:
        command = [*self._command, *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)
