"""Push to a registry; a second push sends only new layers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from containers import wait_until
from factory import Factory, run

from cog_triton.system.ports import free_ports


class Registry:
    """Registry on this machine, and the blobs it was sent."""

    def __init__(self, directory: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._log = directory / "log"
        config = directory / "config.yml"
        config.write_text(
            "version: 0.1\n"
            "log: {accesslog: {disabled: false}}\n"
            f"storage: {{filesystem: {{rootdirectory: {directory}/data}}}}\n"
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


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A running registry, stopped at the end."""
    (port,) = free_ports(1)
    registry = Registry(tmp_path, port)
    try:
        wait_until(registry.answers)
        yield registry
    finally:
        registry.process.terminate()
        registry.process.wait(10)


def test_existing_layers_are_not_sent_again(factory: Factory, registry: Registry) -> None:
    insecure = "--dest-tls-verify=false"
    first, second = factory.image("cog-triton-runner-86"), factory.image("cog-triton-runner-90")
    run(str(first.result), "push", f"{registry.address}/me/model:86", insecure)
    sent = registry.uploads()
    assert sent == len(first.about["layers"]) + 1  # and the configuration
    run(str(second.result), "push", f"{registry.address}/me/model:90", insecure)
    new = set(second.digests.values()) - set(first.digests.values())
    assert registry.uploads() - sent == len(new) + 1
    accept = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
    url = f"http://{registry.address}/v2/me/model/manifests/90"
    manifest = httpx.get(url, headers=accept).json()
    assert len(manifest["layers"]) == len(second.about["layers"])
