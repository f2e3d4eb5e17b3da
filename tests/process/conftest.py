"""What tests of real child processes need of the machine and of their process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import clean_environment
import pytest
from cuda_driver import gpu_driver
from sealed_engines import H200
from supervised_triton import make as make
from supervised_triton import supervised as supervised
from vllm_engines import double_environment

clean_environment.clean()
# A test's own process is a parent and a server at once; gRPC's handlers of a fork end its children.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Children import the engines of step_engines.py.
_PATHS = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of asynchronous tests."""
    return "asyncio"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process, and those that it starts, GPUs of these facts."""

    def give(**facts: object) -> None:
        place = tmp_path / f"driver-{len(list(tmp_path.glob('driver-*')))}"
        for name, value in gpu_driver(place, **{"gpu_name": H200, **facts}).items():
            monkeypatch.setenv(name, value)

    give()
    return give


@pytest.fixture
def vllm_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double of vLLM, which writes a journal and dies once the file `death` is there."""
    death = str(tmp_path / "death")
    values = double_environment(tmp_path / "journal", VLLM_DOUBLE_DEATH=death)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
