"""Fixtures of the image tests: one flake factory, one docker daemon and one engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from containers import wait_until
from factory import REPOSITORY, Factory, Image, run
from local_registry import Registry

from cog_triton.system.ports import free_ports


@pytest.fixture(scope="session")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """The flake of this repository, ready to build."""
    return Factory(tmp_path_factory.mktemp("factory"))


@pytest.fixture(scope="session")
def docker_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """DOCKER_HOST: as set, else of a daemon that runs as long as the tests."""
    if host := os.environ.get("DOCKER_HOST"):
        yield host
        return
    script = str(REPOSITORY / "scripts" / "ci-docker.sh")
    directory = str(tmp_path_factory.mktemp("docker"))
    os.environ["DOCKER_HOST"] = run(script, "start", directory).strip()
    try:
        yield os.environ["DOCKER_HOST"]
    finally:
        del os.environ["DOCKER_HOST"]
        run(script, "stop", directory)
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def cpu(factory: Factory, docker_host: str) -> Image:
    """The CPU image, in docker."""
    image = factory.image("cog-triton-runner-cpu")
    assert f"Loaded image: {image.reference}" in image.load()
    return image


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """engine.tar of the demo model; ENGINE_TAR names an existing one."""
    if given := os.environ.get("ENGINE_TAR"):
        return Path(given).resolve()
    directory = tmp_path_factory.mktemp("engine")
    config = REPOSITORY / "configs" / "build" / "smollm2-135m-cpu.yaml"
    output = directory / "engine.tar"
    options = ["--work-dir", directory / "work", "--output", output]
    command = [sys.executable, "-m", "cog_triton", "build", config, *options]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    return output


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
