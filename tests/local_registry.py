"""Registry on this machine, for pushes."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cog_triton.system.ports import free_ports

_ACCEPT = {
    "Accept": "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json"
}


class Registry:
    """Docker's registry 2.8, which has no referrers API, and the blobs it was sent."""

    def __init__(self, directory: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.data = directory / "data"
        self._log = directory / "log"
        config = directory / "config.yml"
        config.write_text(
            "version: 0.1\n"
            "log: {accesslog: {disabled: false}}\n"
            f"storage: {{filesystem: {{rootdirectory: {self.data}}}}}\n"
            f"http: {{addr: '{self.address}'}}\n"
        )
        with self._log.open("wb") as log:
            command = ["docker-registry", "serve", config]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def answers(self) -> bool:
        """Whether it is ready."""
        try:
            return httpx.get(f"http://{self.address}/v2/").status_code == 200
        except httpx.HTTPError:
            return False

    def uploads(self) -> int:
        """Number of blobs uploaded so far."""
        return len(re.findall(r'"PUT /v2/\S+/blobs/uploads/', self._log.read_text()))

    def fetched(self, repository: str) -> set[str]:
        """Digests of the blobs of a repository that were fetched so far."""
        pattern = rf'"GET /v2/{repository}/blobs/(sha256:\w+)'
        return set(re.findall(pattern, self._log.read_text()))

    def manifest(self, repository: str, reference: str) -> httpx.Response:
        """Manifest of a tag or digest."""
        url = f"http://{self.address}/v2/{repository}/manifests/{reference}"
        return httpx.get(url, headers=_ACCEPT)

    def blob(self, repository: str, digest: str) -> bytes:
        """Content of a blob."""
        return httpx.get(f"http://{self.address}/v2/{repository}/blobs/{digest}").content


@contextmanager
def running(directory: Path) -> Iterator[Registry]:
    """A registry that answers; the test is skipped where there is none to run."""
    if shutil.which("docker-registry") is None:
        pytest.skip("needs docker-registry (Debian: apt-get install docker-registry)")
    started = Registry(directory, free_ports(1)[0])
    try:
        for _ in range(600):
            if started.answers():
                break
            time.sleep(0.1)
        yield started
    finally:
        started.process.terminate()
        started.process.wait()
