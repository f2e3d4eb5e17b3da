"""kubectl for a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMESPACE = "default"


class Kubectl:
    """kubectl of the user's directory, else of PATH, with a kubeconfig."""

    def __init__(self, config: Path, binaries: Path | None = None) -> None:
        self.config = config
        path = f"{binaries or ''}:{os.environ['PATH']}"
        self._command = [
            shutil.which("kubectl", path=path) or "kubectl",
            f"--kubeconfig={config}",
            *("-n", NAMESPACE),
        ]

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

    def apply(self, *objects: dict[str, Any]) -> None:
        """Create or change objects."""
        self(
            "apply",
            "-f",
            "-",
            given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
        )

    def _run(
        self, arguments: tuple[str, ...], given: str | None
    ) -> subprocess.CompletedProcess[str]:
        command = [*self._command, *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)
