"""An image's way on one machine: fetched, unpacked, run and removed by containerd, each by itself.

`docker pull` unpacks a layer while it downloads the next ones, so its parts cannot be told apart;
containerd, which is below docker and Kubernetes, does one after the other when asked to. This is
the containerd of the docker daemon that scripts/ci-docker.sh starts.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

CI_DOCKER = Path(__file__).parents[1] / "scripts" / "ci-docker.sh"
CONTAINER = "bench-pull"
_READY_S = 300


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a command; returns what it prints, and raises RuntimeError with its complaint."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


class Daemon:
    """A docker daemon and the containerd that it runs."""

    def __init__(self, directory: Path) -> None:
        self.docker_host = run(CI_DOCKER, "start", directory).strip()
        socket = directory / "exec" / "containerd" / "containerd.sock"
        self._ctr = ("ctr", "--address", str(socket), "--namespace", "bench")

    def docker(self, *arguments: str) -> str:
        """Run docker against this daemon."""
        return run("docker", *arguments, environment={"DOCKER_HOST": self.docker_host})

    def ctr(self, *arguments: str) -> str:
        """Run containerd's own client."""
        return run(*self._ctr, *arguments)

    def fetch(self, reference: str) -> None:
        """Download all blobs of an image from a registry without TLS."""
        self.ctr("content", "fetch", "--plain-http", reference)

    def unpack(self, digest: str) -> None:
        """Unpack a fetched image, by the digest of its manifest."""
        self.ctr("snapshots", "unpack", digest)

    def remove(self, reference: str) -> None:
        """Remove an image with its blobs and snapshots."""
        self.ctr("images", "rm", "--sync", reference)

    @contextmanager
    def running(self, reference: str, port: int, *options: str) -> Iterator[str]:
        """Run an unpacked image on the host's network; yields Cog's URL at once."""
        # ctr copies the image's labels, and refuses those above 4 KB, as Cog's schema is.
        label = "--label=run.cog.openapi_schema=-"
        own = ("--detach", "--net-host", "--null-io", label)
        self.ctr("run", *own, *options, reference, CONTAINER)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            self.ctr("tasks", "rm", "--force", CONTAINER)
            self.ctr("containers", "rm", CONTAINER)


@contextmanager
def daemon(directory: Path) -> Iterator[Daemon]:
    """A daemon of our own, stopped at the end."""
    try:
        yield Daemon(directory)
    finally:
        run(CI_DOCKER, "stop", directory)


def wait_until_ready(url: str) -> None:
    """Return when Cog is ready; raises RuntimeError when it cannot be any more."""
    deadline = time.monotonic() + _READY_S
    while (status := _status(url)) != "READY":
        if status == "SETUP_FAILED" or time.monotonic() > deadline:
            raise RuntimeError(f"not ready: {status}")
        time.sleep(0.05)


def _status(url: str) -> str:
    try:
        answer = httpx.get(f"{url}/health-check", timeout=5).json()
    except (httpx.HTTPError, ValueError):
        return "no answer"
    return str(answer.get("status"))
