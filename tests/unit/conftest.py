"""What several tests need of the machine and of their process."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import clean_environment
import local_registry
import pytest
from local_registry import Registry
from registry_double import RegistryDouble, running
from sample_engines import V1, directory, with_manifest

clean_environment.clean()
# A test's own process is a parent and a server at once; gRPC's handlers of a fork end its children.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without credentials of registries."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def double() -> Iterator[RegistryDouble]:
    """A registry that does as it is told."""
    with running(RegistryDouble()) as started:
        yield started


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Docker's registry."""
    with local_registry.running(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine of TensorRT-LLM, of four ranks, with its manifest."""
    return with_manifest(directory(tmp_path / "engine", V1, 4))


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that configure logging: handlers and levels are put back."""
    root, package = logging.getLogger(), logging.getLogger("cog_triton")
    before = root.handlers[:], root.level, package.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])
