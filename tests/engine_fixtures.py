"""The demo engine, and one server of it for a worker's tests."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import REPOSITORY, Stack

from cog_triton.artifact.engine_tar import unpack


@pytest.fixture(scope="session")
def engine_tar() -> Path:
    """The demo engine, built by the real builder; the work directory keeps it between runs."""
    tar = REPOSITORY / ".work" / "test" / "engine.tar"
    tar.parent.mkdir(parents=True, exist_ok=True)
    config = REPOSITORY / "configs" / "build" / "smollm2-135m-cpu.yaml"
    command = [sys.executable, "-m", "cog_triton", "build", str(config)]
    command += [f"--output={tar}", f"--work-dir={tar.parent / 'build'}"]
    with (tar.parent / "lock").open("w") as lock:  # two pytest workers ask for the same file
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True)
    return tar


@pytest.fixture(scope="session")
def engine_dir(engine_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo engine, unpacked."""
    directory = tmp_path_factory.mktemp("engine") / "engine"
    unpack(engine_tar, directory)
    return directory


@pytest.fixture(scope="session")
def stack(engine_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One server for all tests that do not break it."""
    running = Stack(tmp_path_factory.mktemp("stack"), str(engine_tar))
    with running.served():
        yield running
