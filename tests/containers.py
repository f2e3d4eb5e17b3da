"""Containers of an image under test, run by the docker that DOCKER_HOST names, on host ports."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from cog_triton.system.ports import free_ports


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Return once `condition()` is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.05)


def docker(*arguments: str, timeout: float = 300) -> str:
    """What a docker command prints; fails with what it complains of."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stdout


class Container:
    """A running container, reached on free ports of this machine; Cog in it is ours to ask."""

    def __init__(self, image: str, *options: str, **environment: str) -> None:
        self.port, http, grpc, metrics = free_ports(4)
        self.url = f"http://127.0.0.1:{self.port}"
        ports = {"PORT": self.port, "TRITON_HTTP_PORT": http}
        ports |= {"TRITON_GRPC_PORT": grpc, "TRITON_METRICS_PORT": metrics}
        self.ports = (self.port, http, grpc, metrics)
        settings = [f"--env={name}={value}" for name, value in (ports | environment).items()]
        self.id = docker("run", "--detach", "--network=host", *settings, *options, image).strip()

    def state(self) -> dict[str, Any]:
        """Docker's State of the container."""
        state: dict[str, Any] = json.loads(docker("inspect", self.id))[0]["State"]
        return state

    def logs(self) -> str:
        """Everything it has printed."""
        done = subprocess.run(["docker", "logs", self.id], capture_output=True, text=True)
        return done.stdout + done.stderr

    def health(self) -> dict[str, Any]:
        """Cog's health, {} while it does not answer."""
        try:
            answer: dict[str, Any] = httpx.get(f"{self.url}/health-check", timeout=60).json()
        except httpx.HTTPError:
            return {}
        return answer

    def wait_until_ready(self, seconds: float = 120) -> None:
        """Return when Cog is ready; fail with the log when it cannot be any more."""
        deadline = time.monotonic() + seconds
        while (status := self.health().get("status")) != "READY":
            assert status != "SETUP_FAILED", self.logs()
            assert self.state()["Running"], self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def predict(self, timeout: float = 300, **inputs: Any) -> dict[str, Any]:
        """One prediction, whole."""
        response = httpx.post(f"{self.url}/predictions", json={"input": inputs}, timeout=timeout)
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, **inputs: Any) -> Iterator[tuple[str, dict[str, Any], float]]:
        """(event, data, seconds since the request) of one prediction, as they arrive."""
        headers = {"Accept": "text/event-stream"}
        request = {"json": {"input": inputs}, "headers": headers, "timeout": 60}
        started, event = time.monotonic(), ""
        with httpx.stream("POST", f"{self.url}/predictions", **request) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("event: "):
                    event = line[7:]
                elif line.startswith("data: "):
                    yield event, json.loads(line[6:]), time.monotonic() - started


@contextmanager
def running(image: str, *options: str, **environment: str) -> Iterator[Container]:
    """A container that is gone afterwards."""
    container = Container(image, *options, **environment)
    try:
        yield container
    finally:
        docker("rm", "--force", "--volumes", container.id)
